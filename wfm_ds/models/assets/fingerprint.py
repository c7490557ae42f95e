"""A hash of pipeline subfolders that does not depend on their location and is fast for large weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.weight_variants import WEIGHTS_SUFFIX, list_weight_files

END_BYTES = 1 << 20
UNUSED_WEIGHT_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx"})  # never loaded


def fingerprint_folders(folder: Path, parts: Iterable[str]) -> str:
    """Return a SHA-256 hex digest of the pipeline subfolders in `parts`, such as "vae".

    Configs and tokenizer files are hashed completely. For weight files, only size, header, first MiB and last MiB are
    hashed; files that would not be loaded are skipped. Raises ModelError if a file cannot be read.
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
