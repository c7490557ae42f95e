"""Cache of tensors on disk. Each entry is one safetensors file that is written atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wfm_ds.storage import atomic

TensorKey = Mapping[str, Any]
"""Everything that the tensors depend on, as JSON values. Entries with equal keys have equal tensors."""


class TensorStore:
    """Cache of tensors on disk for concurrent processes. Damaged files and files with other keys count as missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # temporary files are here, not next to the entries, so that stale ones are found quickly

    def __contains__(self, key: TensorKey) -> bool:
        return self._tensor_names(key) is not None

    def read(self, key: TensorKey) -> dict[str, Tensor] | None:
        names = self._tensor_names(key)
        if names is None:
            return None
        try:
            with safe_open(self._entry_path(key), framework="pt") as file:
                return {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError):  # removed or replaced in the meantime
            return None

    def write(self, key: TensorKey, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors from any device under this key. Raises OSError."""
        path = self._entry_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with atomic.new_file(path, self.folder) as part:
            save_file(cpu_tensors, part, metadata={"key": canonical_json(key)})

    def _entry_path(self, key: TensorKey) -> Path:
        digest = hashlib.sha256(canonical_json(key).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def _tensor_names(self, key: TensorKey) -> list[str] | None:
        try:
            with safe_open(self._entry_path(key), framework="pt") as file:
                if (file.metadata() or {}).get("key") == canonical_json(key):
                    return list(file.keys())
        except (OSError, SafetensorError):
            pass
        return None


def canonical_json(key: TensorKey) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))
