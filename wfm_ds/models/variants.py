"""Select which safetensors files of a network to load, by name.

diffusers and transformers call an alternative set of weights a variant: `model.bf16.safetensors`, with shards
`model.bf16-00001-of-00002.safetensors` or (older releases) `model-00001-of-00002.bf16.safetensors`. Some folders only
contain a variant, such as SANA's BF16 repositories.
"""

from __future__ import annotations

import re
from pathlib import Path

from wfm_ds.errors import ModelError

WEIGHTS = ".safetensors"
NAME = re.compile(r"[^.]+?(?:\.(?P<new>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<old>\w+))?\.safetensors")
PREFERRED = "bf16"


def variant_in(name: str) -> str | None:
    """Return the variant in a weight file's name; None for plain weights."""
    match = NAME.fullmatch(name)
    return None if match is None else match["new"] or match["old"]


def variant_to_load(folder: Path) -> str | None:
    """Return the variant to load from a network's folder; None if it has plain weights or no weights.

    Raises ModelError for several variants without bf16.
    """
    variants = {variant_in(file.name) for file in folder.glob(f"*{WEIGHTS}")}
    if not variants or None in variants:
        return None
    if len(variants) > 1 and PREFERRED not in variants:
        names = ", ".join(sorted(str(name) for name in variants))
        raise ModelError(f"{folder} only has the variants {names}; keep one of them")
    return PREFERRED if PREFERRED in variants else variants.pop()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files to load from a network's folder, sorted by name."""
    variant = variant_to_load(folder)
    return sorted(file for file in folder.glob(f"*{WEIGHTS}") if variant_in(file.name) == variant)


def index_file(folder: Path, base: str) -> Path:
    """Return the path of the shard index of `base` (diffusion_pytorch_model or model). The file may not exist."""
    variant = variant_to_load(folder)
    return folder / (f"{base}{WEIGHTS}.index.{variant}.json" if variant else f"{base}{WEIGHTS}.index.json")


def pipeline_variant(folder: Path) -> str | None:
    """Return the `variant` argument that diffusers needs to load all components of a pipeline; None if none."""
    variants = {variant for part in sorted(folder.iterdir()) if part.is_dir() and (variant := variant_to_load(part))}
    if len(variants) > 1:
        raise ModelError(
            f"{folder}: components have different variants ({', '.join(sorted(variants))}); diffusers can load only one"
        )
    return variants.pop() if variants else None
