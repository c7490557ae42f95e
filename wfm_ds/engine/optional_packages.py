"""Checks the optional packages that some recipe keys need."""

from __future__ import annotations

from importlib.util import find_spec

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe

EXTRAS = {
    "bitsandbytes": "'wfm_ds[low-bit]'",
    "torchao": "'wfm_ds[fp8]'",
    # Built from source against the installed torch.
    "transformer_engine": "--no-build-isolation 'wfm_ds[transformer-engine]'",
}
"""{package: argument of `pip install` that installs it}."""


def require_package(package: str, key: str) -> None:
    """Raise RecipeError if the package is not installed. key: recipe key that needs the package."""
    if find_spec(package) is None:
        raise RecipeError(
            f"{key} needs the package {package}, which is not installed: pip install {EXTRAS[package]}, or "
            "remove the key"
        )


def require_packages(recipe: Recipe) -> None:
    """Raise RecipeError for the first recipe key that needs a missing package."""
    if recipe.model.base_precision == "nf4":
        require_package("bitsandbytes", "model.base_precision: nf4")
    if (library := recipe.model.fp8_training) is not None:
        require_package(library, f"model.fp8_training: {library}")
    if recipe.optimizer.name == "adamw8bit":
        require_package("bitsandbytes", "optimizer.name: adamw8bit")
