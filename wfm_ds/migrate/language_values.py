"""Converters for values in configurations of vision-language models (see diffusers_values.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wfm_ds.errors import DataError
from wfm_ds.language.annotations import read_rows
from wfm_ds.migrate.config import CosmosConfig, NoCounterpart

ANNOTATIONS = "custom.dataset.annotation_path"


def annotation_path(value: str, source: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("empty value")
    source.add_note(
        "data.pack: false makes batches with the same number of conversations as in Cosmos-RL, without padding; true "
        "fills sequences up to data.max_tokens, and engine.micro_batch_size then counts sequences"
    )
    return value


def media_folder(value: str, _: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("empty value: paths in the annotations are absolute; omit data.media_path")
    return value


def system_turn(value: str, _: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("empty value: the chat template chooses the system prompt; omit data.system_prompt")
    return value


def pixel_limits(_: Any, source: CosmosConfig) -> dict[str, int]:
    """Return the recipe section data.pixels: those of the keys `min` and `max` that the configuration sets."""
    limits = {name: source.settings.get(f"custom.vision.{name}_pixels") for name in ("min", "max")}
    return {name: int(value) for name, value in limits.items() if value is not None}


def video_settings(_: Any, source: CosmosConfig) -> dict[str, float]:
    """Return the recipe section data.video: the key `fps` and, if the configuration sets it, `max_frames`."""
    max_frames = source.settings.get("custom.vision.max_frames")
    return {"fps": float(source["custom.vision.fps"])} | ({} if max_frames is None else {"max_frames": int(max_frames)})


def holdout_fraction(value: float, _: CosmosConfig) -> float:
    if value >= 1:
        raise NoCounterpart("a number of samples; validation.holdout is a fraction")
    return value


def num_readers(value: int, _: CosmosConfig) -> int:
    return max(value, 1)  # Cosmos-RL's 0 means that the training process reads the data


def count_conversations(source: CosmosConfig) -> int | None:
    file = Path(str(source.settings.get(ANNOTATIONS, "")))
    if not file.is_file():
        return None
    try:
        return sum(1 for _ in read_rows(file)) or None
    except DataError:
        return None
