"""The values of configurations of vision-language models that take more than another name; see values.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wfm_ds.errors import DataError
from wfm_ds.language.annotations import rows_of
from wfm_ds.migrate.config import CosmosConfig, NoCounterpart

ANNOTATIONS = "custom.dataset.annotation_path"


def annotation_file(value: str, source: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("it is empty")
    source.note(
        "data.pack false: a batch has as many conversations as there, side by side in a row without padding; true "
        "fills rows of data.max_tokens, and engine.micro_batch_size counts those"
    )
    return value


def media_folder(value: str, _: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("it is empty: the annotations have absolute paths, as here without data.media_path")
    return value


def system_turn(value: str, _: CosmosConfig) -> str:
    if not value:
        raise NoCounterpart("it is empty: the model's chat template decides, as here without data.system_prompt")
    return value


def pixels(_: Any, source: CosmosConfig) -> dict[str, int]:
    """The section data.pixels of what custom.vision says."""
    given = {name: source.given.get(f"custom.vision.{name}_pixels") for name in ("min", "max")}
    return {name: int(value) for name, value in given.items() if value is not None}


def video(_: Any, source: CosmosConfig) -> dict[str, float]:
    """The section data.video of what custom.vision says."""
    most = source.given.get("custom.vision.max_frames")
    return {"fps": float(source["custom.vision.fps"])} | ({} if most is None else {"max_frames": int(most)})


def holdout(value: float, _: CosmosConfig) -> float:
    if value >= 1:
        raise NoCounterpart("a number of samples; validation.holdout is a share of them")
    return value


def readers(value: int, _: CosmosConfig) -> int:
    return max(value, 1)  # 0 there: the trainer reads itself


def count(source: CosmosConfig) -> int | None:
    """Conversations of the annotations; None where they are not on this machine."""
    file = Path(str(source.given.get(ANNOTATIONS, "")))
    if not file.is_file():
        return None
    try:
        return sum(1 for _ in rows_of(file)) or None
    except DataError:
        return None
