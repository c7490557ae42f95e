"""Clean latents of training media, encoded once and kept on disk."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wfm_ds.models.base import DiffusionModel
from wfm_ds.storage.tensor_store import TensorStore

if TYPE_CHECKING:
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Media

NAME = "latents"  # of the tensor in an entry


class LatentCache:
    """Latents by medium and by which of its pixels are encoded. Reads may come from any thread."""

    def __init__(self, model: DiffusionModel, store: TensorStore) -> None:
        self._store = store
        self._identity = model.latent_identity()

    def holds(self, medium: Media, framing: Framing) -> bool:
        return self._key(medium, framing) in self._store

    def read(self, medium: Media, framing: Framing) -> Tensor | None:
        """[C,...] float32 on the host, None if there is nothing."""
        entry = self._store.read(self._key(medium, framing))
        return None if entry is None else entry[NAME]

    def write(self, medium: Media, framing: Framing, latents: Tensor) -> None:
        """Keep the latents [C,...] of one medium. Raises OSError."""
        self._store.write(self._key(medium, framing), {NAME: latents})

    def _key(self, medium: Media, framing: Framing) -> dict[str, Any]:
        framed = asdict(framing)
        if framing.span is None:  # most runs: the keys of latents that were kept before there were trajectories
            del framed["span"]
        return {**self._identity, "framing": framed, "medium": list(medium.identity())}
