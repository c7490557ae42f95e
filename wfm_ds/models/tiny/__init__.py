"""Tiny random pipelines for tests, laptops and the quickstart: `wfm models tiny FAMILY OUT_DIR`.

Each is a complete folder that plain diffusers loads offline. Its bytes are identical on every run, because vocabularies
are written by hand and weights use fixed seeds. Its `call.json` contains the pipeline call arguments for one small
image or video.

Each module of this package is named after a FAMILY. Its function `build()` returns the pipeline and the call arguments.
`language/` contains vision-language models for transformers, and `parts/` contains shared components.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from wfm_ds.errors import ModelError
from wfm_ds.models.base import hide_progress_bars
from wfm_ds.models.tiny.language import LANGUAGE_FAMILIES as LANGUAGE_FAMILIES

FAMILIES = tuple(
    sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg and info.name != "__main__")
)


def build_tiny_pipeline(family: str) -> tuple[Any, dict[str, Any]]:
    """Return (pipeline in float32 and evaluation mode, call arguments). Raises ModelError for an unknown family."""
    if family not in FAMILIES:
        raise ModelError(f"{family} is not a tiny pipeline; use one of {', '.join(FAMILIES)}")
    pipeline: tuple[Any, dict[str, Any]] = importlib.import_module(f"{__name__}.{family}").build()
    return pipeline


def write_tiny_model(family: str, out: Path) -> None:
    """Write a tiny model to `out`. Raises ModelError for an unknown family, or if `out` exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; choose a new one")
    if family in LANGUAGE_FAMILIES:
        with hide_progress_bars():
            importlib.import_module(f"{__name__}.language.{family}").build().save_pretrained(out)
        return
    pipeline, call = build_tiny_pipeline(family)
    with hide_progress_bars():
        pipeline.save_pretrained(out)
    drop_derived_config(out / "vae/config.json")
    (out / "call.json").write_text(json.dumps(call, indent=2) + "\n")


def drop_derived_config(file: Path) -> None:
    """Remove block_out_channels from the config of an AutoencoderTiny.

    AutoencoderTiny computes this value from other keys, but saves it too. Diffusers would log a warning when it loads
    the key.
    """
    config = json.loads(file.read_text())
    if config["_class_name"] == "AutoencoderTiny":
        del config["block_out_channels"]
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def source_files() -> list[Path]:
    """Return the source files that determine the bytes of all tiny pipelines."""
    return sorted(path for folder in __path__ for path in Path(folder).rglob("*.py"))
