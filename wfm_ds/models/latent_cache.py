"""Clean latents of training media, encoded once and kept on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from wfm_ds.models.base import DiffusionModel
from wfm_ds.tensor_store import TensorStore

NAME = "latents"  # of the tensor in an entry


class LatentCache:
    """Latents by the identity of their medium. Reads may come from any thread."""

    def __init__(self, model: DiffusionModel, store: TensorStore, framing: Mapping[str, Any]) -> None:
        """`framing`: what, besides the medium, decides which pixels are encoded, as JSON."""
        self._store = store
        self._identity = {**model.latent_identity(), "framing": dict(framing)}

    def __contains__(self, medium: Sequence[str | int]) -> bool:
        return self._key(medium) in self._store

    def read(self, medium: Sequence[str | int]) -> Tensor | None:
        """[C,...] float32 on the host, None if there is nothing."""
        entry = self._store.read(self._key(medium))
        return None if entry is None else entry[NAME]

    def write(self, medium: Sequence[str | int], latents: Tensor) -> None:
        """Keep the latents [C,...] of one medium. Raises OSError."""
        self._store.write(self._key(medium), {NAME: latents})

    def _key(self, medium: Sequence[str | int]) -> dict[str, Any]:
        return {**self._identity, "medium": list(medium)}
