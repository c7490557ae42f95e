"""Validates the settings of LoRA files, and finds the rank and alpha of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import peft
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from wfm_ds.errors import ModelError
from wfm_ds.storage.filesystem import shorten_error, shorten_path

MAX_PATTERN_CHARS = 200
MAX_REGEXES = 8  # maximum number of regular expressions in a file
PLAIN_PATTERN = re.compile(r"[\w.-]+")
# Constructs that may take exponential time to match: quantified groups, lookarounds, back-references, {counts}.
SLOW_REGEX = re.compile(r"\)[*+?]|\(\?|\\\d|\{")
LAYER_CHOICES = ("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform")
Value = TypeVar("Value")


def _check_pattern(pattern: str) -> str:
    """Raise ValueError for a regular expression that is invalid or may take very long to match."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern has more than {MAX_PATTERN_CHARS} characters")
    if not PLAIN_PATTERN.fullmatch(pattern):
        if SLOW_REGEX.search(pattern) or sum(map(pattern.count, "*+?")) > 2:
            raise ValueError(f"{shorten_path(pattern)} is too complex; write the layer names")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{shorten_path(pattern)} is not a regular expression: {error}") from error
    return pattern


def _check_patterns(patterns: dict[str, Any]) -> dict[str, Any]:
    if sum(not PLAIN_PATTERN.fullmatch(pattern) for pattern in patterns) > MAX_REGEXES:
        raise ValueError(f"more than {MAX_REGEXES} regular expressions; write the layer names")
    return patterns


Rank = Annotated[StrictInt, Field(gt=0)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Pattern = Annotated[StrictStr, AfterValidator(_check_pattern)]


class LoraSettings(BaseModel):
    """The LoRA settings that wfm_ds reads from adapter_config.json or a file header. Other settings stay unchanged."""

    model_config = ConfigDict(extra="allow")
    r: Rank
    lora_alpha: Alpha
    rank_pattern: Annotated[dict[Pattern, Rank], AfterValidator(_check_patterns)] | None = None
    alpha_pattern: Annotated[dict[Pattern, Alpha], AfterValidator(_check_patterns)] | None = None
    use_rslora: StrictBool | None = None
    use_dora: StrictBool | None = None
    target_modules: StrictStr | list[StrictStr] | None = None
    modules_to_save: list[StrictStr] | None = None
    base_model_name_or_path: StrictStr | None = None


def check_settings(settings: object, source: str) -> dict[str, Any]:
    """Return the settings unchanged. Raises ModelError if they are not a JSON object or PEFT would reject them.

    source: file that contains the settings, for messages.
    """
    try:
        checked = LoraSettings.model_validate(settings).model_dump(exclude_unset=True)
        peft.LoraConfig(**peft_settings(checked))
    except ValidationError as error:
        first = error.errors()[0]
        place = shorten_path(".".join(str(key) for key in first["loc"] if key != "[key]"))
        raise ModelError(f"{source}: {place or 'settings'}: {first['msg']}; copy the LoRA again") from error
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        reason = shorten_error(error)
        raise ModelError(f"{source} has settings that PEFT rejects ({reason}); copy the LoRA again") from error
    return checked


def peft_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in peft.LoraConfig.__dataclass_fields__}


def select_layers(settings: Mapping[str, Any], layers: Iterable[str]) -> dict[str, Any]:
    """Return PEFT settings that select exactly these layers, without regular expressions."""
    kept = {name: value for name, value in peft_settings(settings).items() if name not in LAYER_CHOICES}
    return kept | {"target_modules": sorted(layers)}


def layer_alpha(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the alpha of a layer, so that the layer's update is alpha / rank * B @ A, also for rsLoRA."""
    alpha = float(_select_value(settings.get("alpha_pattern"), module, settings["lora_alpha"]))
    return alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha


def layer_rank(settings: Mapping[str, Any], module: str) -> int:
    return int(_select_value(settings.get("rank_pattern"), module, settings["r"]))


def _select_value(patterns: Mapping[str, Value] | None, module: str, default: Value) -> Value:
    """Return the value of the first pattern that matches the layer name as in PEFT, or `default`.

    A pattern is a layer name or a regular expression. It must match the whole layer name, or the end of the layer name
    after a dot.
    """
    for pattern, value in (patterns or {}).items():
        if PLAIN_PATTERN.fullmatch(pattern):
            if module == pattern or module.endswith(f".{pattern}"):
                return value
        elif re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
