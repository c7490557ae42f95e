"""The safetensors files of a network: select the files to load, and compute fingerprints of their content.

diffusers and transformers call an alternative set of weights a variant, such as bf16 in `model.bf16.safetensors`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from wfm_ds.errors import ModelError

WEIGHTS_SUFFIX = ".safetensors"
WEIGHT_FILE_NAME = re.compile(r"[^.]+?(?:\.(?P<new>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<old>\w+))?\.safetensors")
PREFERRED_VARIANT = "bf16"
END_BYTES = 1 << 20
UNUSED_WEIGHT_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx"})  # never loaded


def parse_variant(name: str) -> str | None:
    """Return the variant, such as "bf16", in a weight file's name, or None for plain weights."""
    match = WEIGHT_FILE_NAME.fullmatch(name)
    return None if match is None else match["new"] or match["old"]


def select_variant(folder: Path) -> str | None:
    """Return the variant to load from a network's folder, or None if the folder has plain weights or is empty.

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
    """Return the path of a network's shard index, which may not exist.

    base: base name of the weight files, `diffusion_pytorch_model` or `model`.
    """
    variant = select_variant(folder)
    return folder / (
        f"{base}{WEIGHTS_SUFFIX}.index.{variant}.json" if variant else f"{base}{WEIGHTS_SUFFIX}.index.json"
    )


def pipeline_variant(folder: Path) -> str | None:
    """Return the `variant` argument for loading this pipeline with diffusers, or None for plain weights.

    Raises ModelError if the components have different variants.
    """
    variants = {variant for part in sorted(folder.iterdir()) if part.is_dir() and (variant := select_variant(part))}
    if len(variants) > 1:
        raise ModelError(
            f"{folder}: components have different variants ({', '.join(sorted(variants))}); keep one, because "
            "diffusers loads only one"
        )
    return variants.pop() if variants else None


def fingerprint_folders(folder: Path, parts: Iterable[str]) -> str:
    """Return a SHA-256 hex digest of subfolders of a pipeline folder.

    parts: names of the subfolders, such as "vae".
    Only the size, header, first MiB and last MiB of a weight file are hashed. Weight files that are not loaded are
    skipped. Raises ModelError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for part in sorted(parts):
        weights = set(list_weight_files(folder / part))
        for path in sorted(
            p for p in (folder / part).rglob("*") if p.is_file() and p.suffix not in UNUSED_WEIGHT_SUFFIXES
        ):
            if path.suffix == WEIGHTS_SUFFIX and path.parent == folder / part and path not in weights:
                continue
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            try:
                digest.update(read_file_ends(path) if path.suffix == WEIGHTS_SUFFIX else path.read_bytes())
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def read_file_ends(path: Path) -> bytes:
    """Return the size (8 bytes), header, first MiB and last MiB of a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        first = file.read(min(size, header + END_BYTES))
        file.seek(max(len(first), size - END_BYTES))
        return size.to_bytes(8, "little") + first + file.read()
