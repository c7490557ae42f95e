"""Lets DeepSpeed check the values of ZeRO settings."""

from __future__ import annotations

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from wfm_ds.errors import RecipeError
from wfm_ds.recipe.deepspeed import find_deepspeed_config, read_deepspeed_config
from wfm_ds.recipe.schema import Recipe


def check_zero_values(recipe: Recipe) -> None:
    """Raise RecipeError if DeepSpeed rejects a value in the section zero_optimization of the JSON file.

    The keys of the file must have been checked before (recipe/deepspeed.py).
    """
    source = find_deepspeed_config(recipe.engine.deepspeed)
    zero = read_deepspeed_config(source)["zero_optimization"]
    zero.pop("zero_hpz_partition_size", None)  # may be "auto", which wfm_ds replaces by a number
    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("zero_optimization", *first["loc"])))
        raise RecipeError(f"{source}: {key}: {first['msg']}: correct it") from error
