"""A hash of parts of a pipeline folder: equal for equal parts wherever they lie, cheap for large weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from wfm_ds.errors import ModelError
from wfm_ds.models.variants import WEIGHTS, weight_files

END_BYTES = 1 << 20
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx"})  # beside them, never loaded


def fingerprint(folder: Path, parts: Iterable[str]) -> str:
    """Hex digest of these subfolders: of whole configs and tokenizer files, and, of each weight file that is loaded, of
    its size, its header and its first and last MiB. ModelError if a file cannot be read."""
    digest = hashlib.sha256()
    for part in sorted(parts):
        weights = set(weight_files(folder / part))
        for path in sorted(p for p in (folder / part).rglob("*") if p.is_file() and p.suffix not in OTHER_WEIGHTS):
            if path.suffix == WEIGHTS and path.parent == folder / part and path not in weights:
                continue
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            try:
                digest.update(ends(path) if path.suffix == WEIGHTS else path.read_bytes())
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def ends(path: Path) -> bytes:
    """Size, header, first and last MiB of a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        first = file.read(min(size, header + END_BYTES))
        file.seek(max(len(first), size - END_BYTES))
        return size.to_bytes(8, "little") + first + file.read()
