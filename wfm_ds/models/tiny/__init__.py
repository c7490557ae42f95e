"""Tiny random pipelines for tests, laptops and the quickstart: `python -m wfm_ds.models.tiny FAMILY OUT_DIR`.

Each is a complete folder that plain diffusers loads offline, with the same bytes on every run: vocabularies are made by
hand, weights come from fixed seeds. `call.json` beside it holds the pipeline arguments for one small image or video.

A module of this folder is a tiny pipeline and its name the FAMILY; `language/` holds vision-language models, which
transformers loads, and `parts/` what several of them are made of.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from wfm_ds.errors import ModelError
from wfm_ds.models.base import without_progress_bars
from wfm_ds.models.tiny.language import LANGUAGE_FAMILIES as LANGUAGE_FAMILIES

FAMILIES = tuple(
    sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg and info.name != "__main__")
)


def tiny_pipeline(family: str) -> tuple[Any, dict[str, Any]]:
    """The pipeline, in float32 and evaluation mode, and the arguments of its call; ModelError for another family."""
    if family not in FAMILIES:
        raise ModelError(f"{family} is not a tiny pipeline; use one of {', '.join(FAMILIES)}")
    made: tuple[Any, dict[str, Any]] = importlib.import_module(f"{__name__}.{family}").build()
    return made


def write_tiny(family: str, out: Path) -> None:
    """Write the tiny pipeline of `family` (one of FAMILIES) into the new or empty folder `out`, or the tiny model of
    one of LANGUAGE_FAMILIES.

    Raises ModelError for another family or a folder that holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; name a new one")
    if family in LANGUAGE_FAMILIES:
        with without_progress_bars():
            importlib.import_module(f"{__name__}.language.{family}").build().save_pretrained(out)
        return
    pipeline, call = tiny_pipeline(family)
    with without_progress_bars():
        pipeline.save_pretrained(out)
    drop_derived_config(out / "vae/config.json")
    (out / "call.json").write_text(json.dumps(call, indent=2) + "\n")


def drop_derived_config(file: Path) -> None:
    """AutoencoderTiny stores block_out_channels, which it derives, and warns at each load that it takes no such key."""
    config = json.loads(file.read_text())
    if config["_class_name"] == "AutoencoderTiny":
        del config["block_out_channels"]
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def sources() -> list[Path]:
    """The code that the bytes of all tiny pipelines depend on, besides the libraries."""
    return sorted(path for folder in __path__ for path in Path(folder).rglob("*.py"))
