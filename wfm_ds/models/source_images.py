"""Source images of editing models, and a cache for the encodings of images and videos."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.vae import PixelCodec
from wfm_ds.tensor_memory import TensorLru, copy_to_device
from wfm_ds.types import SOURCES, Conditioning

SourceSize: TypeAlias = Literal["target", "stock"] | tuple[int, int]
"""Value of data.source_size."""

MAX_CACHE_BYTES = 2**30  # on the host: the first frames of about 100 videos with 81 frames of 480 x 832

_digests: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], str]] = {}  # {id of an array: (array, digest)}


def digest_pixels(pixels: npt.NDArray[np.uint8]) -> str:
    """Return the SHA-256 of the shape and the values of an array, which must not change afterwards.

    The digest of an array is computed only once, because each forward pass of a sample looks up its images.
    """
    key = id(pixels)
    if key not in _digests:
        digest = hashlib.sha256(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()
        _digests[key] = weakref.ref(pixels, lambda _: _digests.pop(key, None)), digest
    return _digests[key][1]


class ImageCache:
    """Keeps the encodings of recently used images or videos, which are conditioning tensors [1, ...], on the host."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._rows = TensorLru(max_bytes)

    def encode(
        self, images: Sequence[npt.NDArray[np.uint8]], setting: Hashable, encode: Callable[[], Conditioning]
    ) -> Conditioning:
        """Return encode() on the host, from the cache if possible.

        images: the pixels that `encode` encodes. setting: value on which the result of `encode` also depends.
        """
        key = (*map(digest_pixels, images), setting)
        row = self._rows.get(key)
        if row is None:
            row = {name: tensor.cpu() for name, tensor in encode().items()}
            self._rows.put({key: row})
        return row


class SourceImages(PixelCodec):
    """Base class that encodes the source images of editing models with the VAE of a pipeline."""

    input_names: frozenset[str] = frozenset()  # data.inputs
    source_size: SourceSize = "target"  # data.source_size

    @cached_property
    def image_cache(self) -> ImageCache:
        return ImageCache()

    @property
    def source_names(self) -> list[str]:
        """The names of the source images that every sample provides."""
        return [name for name in SOURCES if name in self.input_names]

    def source_image_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) in pixels of the source images of a sample with this size.

        With the value `target` of data.source_size, it is the size of the sample. With `stock`, it is the size to which
        the diffusers pipeline resizes a source of the size of the sample.
        """
        if self.source_size == "target":
            return height, width
        return self.stock_source_size(height, width) if self.source_size == "stock" else self.source_size

    def stock_source_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size (height, width) to which the diffusers pipeline resizes a source image of this size."""
        return height, width

    def encode_sources(self, inputs: Sequence[Mapping[str, npt.NDArray[Any]]], size: tuple[int, int]) -> Conditioning:
        """Return {name of a source: latents [B,C,h,w] float32} on the model's device.

        inputs: inputs of B samples. size: (height, width) in pixels of the samples. Raises ValueError if a sample lacks
        a source, or if the size of a source differs from `source_image_size`.
        """
        shape = (*self.source_image_size(*size), 3)
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in self.source_names}
        for sample in inputs:
            for name, latents in rows.items():
                image = sample.get(name)
                if image is None:
                    raise ValueError(f"{name} is missing")
                if image.shape != shape or image.dtype != np.uint8:
                    raise ValueError(f"{name} must be uint8 {list(shape)}, got {image.dtype} {list(image.shape)}")
                latents.append(self.image_cache.encode([image], None, partial(self._encode_source, image))["latents"])
        return {name: copy_to_device(torch.cat(latents), self.device) for name, latents in rows.items()}

    def source_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return {name of a source: latent shape [C,h,w]} for samples with latents of this shape."""
        if not self.source_names:
            return {}
        unit = self.size_multiple(1)
        (_, h, w), (_, rows, columns) = self.latent_shape(unit, unit), shape
        size = self.source_image_size(rows * unit // h, columns * unit // w)
        return {name: self.latent_shape(*size) for name in self.source_names}

    def _encode_source(self, image: npt.NDArray[np.uint8]) -> Conditioning:
        return {"latents": self.encode_uint8([image])}


def create_source_specs(*names: str, required: bool = False) -> Mapping[str, InputSpec]:
    """Return the specifications of source images. Each image requires the previous one."""
    before = (None, *names)
    return {
        name: InputSpec(rank=3, is_image=True, required=required and other is None, requires_input=other)
        for name, other in zip(names, before, strict=False)
    }


def list_image_latents(latents: torch.Tensor, conditioning: Conditioning) -> list[torch.Tensor]:
    """Return the latents of the samples, followed by those of their source images, each [B,C,h,w]."""
    return [latents, *(conditioning[name] for name in SOURCES if name in conditioning)]
