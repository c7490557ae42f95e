"""Packages that only some keys of a recipe need: missing ones are named before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe

EXTRAS = {
    "bitsandbytes": "'wfm_ds[low-bit]'",
    "torchao": "'wfm_ds[fp8]'",
    # Built from its sources against the installed torch.
    "transformer_engine": "--no-build-isolation 'wfm_ds[transformer-engine]'",
}
"""What pip is to install for a package: the extra of setup.py that brings it."""


def require_package(package: str, key: str) -> None:
    """Raises RecipeError, naming the key that asks for it, unless the package is installed."""
    if find_spec(package) is None:
        raise RecipeError(
            f"{key} needs the package {package}, which is not installed: pip install {EXTRAS[package]}, or remove "
            "the key"
        )


def require_packages(recipe: Recipe) -> None:
    """Raises RecipeError for the first key of a recipe whose package is not installed where it trains."""
    if recipe.model.base_precision == "nf4":
        require_package("bitsandbytes", "model.base_precision: nf4")
    if (library := recipe.model.fp8_training) is not None:
        require_package(library, f"model.fp8_training: {library}")
    if recipe.optimizer.name == "adamw8bit":
        require_package("bitsandbytes", "optimizer.name: adamw8bit")
