"""Packages that only some keys of a recipe need: missing ones are named before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe

EXTRAS = {"bitsandbytes": "low-bit", "torchao": "fp8"}
"""The extra of setup.py that brings a package."""


def require_package(package: str, key: str) -> None:
    """Raises RecipeError, naming the key that asks for it, unless the package is installed."""
    if find_spec(package) is None:
        raise RecipeError(
            f"{key} needs the package {package}, which is not installed: pip install 'wfm_ds[{EXTRAS[package]}]', or "
            "remove the key"
        )


def require_packages(recipe: Recipe) -> None:
    """Raises RecipeError for the first key of a recipe whose package is not installed where it trains."""
    if recipe.model.base_precision == "nf4":
        require_package("bitsandbytes", "model.base_precision: nf4")
    if recipe.model.fp8_training == "torchao":
        require_package("torchao", "model.fp8_training: torchao")
    if recipe.optimizer.name == "adamw8bit":
        require_package("bitsandbytes", "optimizer.name: adamw8bit")
