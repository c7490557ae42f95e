"""Select which safetensors files of a network to load, by name.

diffusers and transformers call an alternative set of weights a variant: `model.bf16.safetensors`, with shards
`model.bf16-00001-of-00002.safetensors` or (older releases) `model-00001-of-00002.bf16.safetensors`. Some folders only
contain a variant, such as SANA's BF16 repositories.
"""

from __future__ import annotations

import re
from pathlib import Path

from wfm_ds.errors import ModelError

WEIGHTS_SUFFIX = ".safetensors"
WEIGHT_FILE_NAME = re.compile(r"[^.]+?(?:\.(?P<new>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<old>\w+))?\.safetensors")
PREFERRED_VARIANT = "bf16"


def parse_variant(name: str) -> str | None:
    """Return the variant, such as "bf16", in a weight file's name, or None for plain weights."""
    match = WEIGHT_FILE_NAME.fullmatch(name)
    return None if match is None else match["new"] or match["old"]


def select_variant(folder: Path) -> str | None:
    """Return the variant to load from a network's folder, or None for plain weights or an empty folder.

    Raises ModelError if there are several variants and none of them is bf16.
    """
    variants = {parse_variant(file.name) for file in folder.glob(f"*{WEIGHTS_SUFFIX}")}
    if not variants or None in variants:
        return None
    if len(variants) > 1 and PREFERRED_VARIANT not in variants:
        names = ", ".join(sorted(str(name) for name in variants))
        raise ModelError(f"{folder} only has the variants {names}; keep one of them")
    return PREFERRED_VARIANT if PREFERRED_VARIANT in variants else variants.pop()


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files to load from a network's folder, sorted by name."""
    variant = select_variant(folder)
    return sorted(file for file in folder.glob(f"*{WEIGHTS_SUFFIX}") if parse_variant(file.name) == variant)


def shard_index_path(folder: Path, base: str) -> Path:
    """Return the path of the shard index of `base` (diffusion_pytorch_model or model). The file may not exist."""
    variant = select_variant(folder)
    return folder / (
        f"{base}{WEIGHTS_SUFFIX}.index.{variant}.json" if variant else f"{base}{WEIGHTS_SUFFIX}.index.json"
    )


def pipeline_variant(folder: Path) -> str | None:
    """Return the `variant` argument for diffusers; None for plain weights. Raises ModelError for several variants."""
    variants = {variant for part in sorted(folder.iterdir()) if part.is_dir() and (variant := select_variant(part))}
    if len(variants) > 1:
        raise ModelError(
            f"{folder}: components have different variants ({', '.join(sorted(variants))}); diffusers can load only one"
        )
    return variants.pop() if variants else None
