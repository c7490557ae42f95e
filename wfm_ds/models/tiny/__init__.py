"""Tiny random pipelines for tests, laptops and the quickstart: `wfm models tiny FAMILY OUT_DIR`.

A tiny pipeline is a complete folder that plain diffusers loads offline. The bytes of its files are the same on every
run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wfm_ds.errors import ModelError
from wfm_ds.recipe.tiny import LANGUAGE_MODELS, TINY_FAMILIES

LANGUAGE_FAMILIES = tuple(LANGUAGE_MODELS.values())
FAMILIES = tuple(sorted({family.name for family in TINY_FAMILIES} - {*LANGUAGE_FAMILIES}))


def require_pipeline_family(family: str) -> None:
    """Raise ModelError if no tiny pipeline has this name."""
    if family not in FAMILIES:
        raise ModelError(f"{family} is not a tiny pipeline; use one of {', '.join(FAMILIES)}")


def build_tiny_pipeline(family: str) -> tuple[Any, dict[str, Any]]:
    """Return (pipeline in float32 and evaluation mode, call arguments). Raises ModelError for an unknown family."""
    from wfm_ds.models.tiny.pipelines import PIPELINES  # imports transformers' tokenizers

    require_pipeline_family(family)
    return PIPELINES[family].build(), dict(PIPELINES[family].call)


def write_tiny_model(family: str, out: Path) -> None:
    """Write a tiny model to `out`. Raises ModelError for an unknown family, or if `out` exists and is not empty."""
    from wfm_ds.models.assets.loading import hide_progress_bars  # imports torch

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; choose a new one")
    if family in LANGUAGE_FAMILIES:
        from wfm_ds.models.tiny.language import build_language_model

        with hide_progress_bars():
            build_language_model(family).save_pretrained(out)
        return
    pipeline, call = build_tiny_pipeline(family)
    with hide_progress_bars():
        pipeline.save_pretrained(out)
    drop_derived_config(out / "vae/config.json")
    (out / "call.json").write_text(json.dumps(call, indent=2) + "\n")


def drop_derived_config(file: Path) -> None:
    """Remove block_out_channels from the config of an AutoencoderTiny, because diffusers would warn about it."""
    config = json.loads(file.read_text())
    if config["_class_name"] == "AutoencoderTiny":
        del config["block_out_channels"]
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def source_files() -> list[Path]:
    return sorted(path for folder in __path__ for path in Path(folder).rglob("*.py"))
