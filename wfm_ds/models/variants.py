"""Choice of the safetensors files of a network that are to be loaded, by their names.

Diffusers and transformers call a second set of weights a variant: `model.bf16.safetensors`, in shards
`model.bf16-00001-of-00002.safetensors` or, as older releases wrote them, `model-00001-of-00002.bf16.safetensors`. A
folder may hold nothing but a variant; SANA's BF16 repositories do.
"""

from __future__ import annotations

import re
from pathlib import Path

from wfm_ds.errors import ModelError

WEIGHTS = ".safetensors"
NAME = re.compile(r"[^.]+?(?:\.(?P<new>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<old>\w+))?\.safetensors")
PREFERRED = "bf16"


def variant_in(name: str) -> str | None:
    """The variant that a file of this name belongs to; None for the weights that have no variant."""
    found = NAME.fullmatch(name)
    return None if found is None else found["new"] or found["old"]


def variant_to_load(folder: Path) -> str | None:
    """The variant to load from a network's folder: None where there are weights without one, or no weights at all.

    Raises ModelError if there are several variants and none of them is bf16.
    """
    variants = {variant_in(file.name) for file in folder.glob(f"*{WEIGHTS}")}
    if not variants or None in variants:
        return None
    if len(variants) > 1 and PREFERRED not in variants:
        names = ", ".join(sorted(str(name) for name in variants))
        raise ModelError(f"{folder} holds the variants {names} and no other weights; keep one of them")
    return PREFERRED if PREFERRED in variants else variants.pop()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a network's folder that are loaded, in the order of their names."""
    variant = variant_to_load(folder)
    return sorted(file for file in folder.glob(f"*{WEIGHTS}") if variant_in(file.name) == variant)


def index_file(folder: Path, base: str) -> Path:
    """Path of the index of the shards of `base` (diffusion_pytorch_model, model), if they have one."""
    variant = variant_to_load(folder)
    return folder / (f"{base}{WEIGHTS}.index.{variant}.json" if variant else f"{base}{WEIGHTS}.index.json")


def pipeline_variant(folder: Path) -> str | None:
    """The variant that plain diffusers must be asked for to find all parts of a pipeline; None if it finds them."""
    found = {variant for part in sorted(folder.iterdir()) if part.is_dir() and (variant := variant_to_load(part))}
    if len(found) > 1:
        raise ModelError(f"{folder}: its parts have several variants ({', '.join(sorted(found))}); diffusers loads one")
    return found.pop() if found else None
