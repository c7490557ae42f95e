"""Disk cache of clean latents."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wfm_ds.models.base import DiffusionModel
from wfm_ds.storage.tensor_store import TensorStore

if TYPE_CHECKING:
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Media

TENSOR_NAME = "latents"  # name of the tensor in an entry


class LatentCache:
    """A disk cache of the latents of images and videos. Reads are thread-safe."""

    def __init__(self, model: DiffusionModel, store: TensorStore) -> None:
        self._store = store
        self._identity = model.latent_cache_key()

    def has_latents(self, medium: Media, framing: Framing) -> bool:
        return self._cache_key(medium, framing) in self._store

    def read(self, medium: Media, framing: Framing) -> Tensor | None:
        """Return the cached latents [channels, ...], float32 on the CPU, or None if they are not cached."""
        entry = self._store.read(self._cache_key(medium, framing))
        return None if entry is None else entry[TENSOR_NAME]

    def write(self, medium: Media, framing: Framing, latents: Tensor) -> None:
        """Store the latents [channels, ...] of one image or video. Raises OSError if the disk cannot be written."""
        self._store.write(self._cache_key(medium, framing), {TENSOR_NAME: latents})

    def _cache_key(self, medium: Media, framing: Framing) -> dict[str, Any]:
        settings = asdict(framing)
        # Keep the keys of caches written before these fields existed.
        for name, default in (("span", None), ("sound_rate", None), ("video_resize", "pillow")):
            if settings[name] == default:
                del settings[name]
        return {**self._identity, "framing": settings, "medium": list(medium.identity())}
