"""Caches of texts and media on disk, and the texts that a run will ask for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wfm_ds.chunks import chunks
from wfm_ds.data.cosmos import SAFE_SUFFIX
from wfm_ds.data.datasets import TrainingData, buckets_of
from wfm_ds.data.embeddings import read_pickle
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BadMedia, Framing, centre, decoding
from wfm_ds.data.samples import Media, Sample, file_identity
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.latent_cache import LatentCache
from wfm_ds.models.sampler import negatives
from wfm_ds.models.text_cache import Text, TextCache
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.tensor_store import TensorStore

log = logging.getLogger(__name__)

NUM_AHEAD = 16  # media whose pixels are in memory at once


@dataclass(frozen=True, slots=True)
class EmbeddingFile:
    """A caption's embedding beside it in a Cosmos folder: one tensor [n, D], or a pickle of one array."""

    path: Path

    def identity(self) -> Sequence[str | int]:
        return file_identity(self.path)

    def load(self) -> Tensor:
        if self.path.suffix != SAFE_SUFFIX:
            return torch.from_numpy(read_pickle(self.path))
        try:
            tensors = load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error
        if len(tensors) != 1 or next(iter(tensors.values())).ndim != 2:
            raise DataError(f"{self.path} must hold one tensor [n, D] and nothing else")
        return next(iter(tensors.values()))


def text_cache(recipe: Recipe, model: DiffusionModel, data: TrainingData) -> TextCache:
    """Open the text cache: on disk below data.cache_dir, else in memory alone."""
    folder = recipe.data.cache_dir
    files = {s.prompt.text: EmbeddingFile(s.embedding) for s in samples_of(data) if s.embedding}
    return TextCache(model, store=TensorStore(folder / "text") if folder else None, precomputed=files)


def latent_cache(recipe: Recipe, model: DiffusionModel) -> LatentCache | None:
    if not recipe.data.cache_latents:
        return None
    assert recipe.data.cache_dir is not None  # the recipe is checked
    return LatentCache(model, TensorStore(recipe.data.cache_dir / "latents"))


def needed_texts(recipe: Recipe, model: DiffusionModel, data: TrainingData) -> list[Text]:
    """Every text that the run will encode, once."""
    shown = data.shown[: recipe.validation.num_prompts]
    prompts = [*data.prompts, *(sample.prompt for sample in samples_of(data)), *shown]
    texts: list[Text] = [prompt.text for prompt in prompts]
    if data.samples and recipe.data.caption_dropout > 0:
        texts.append(NegativeText(""))
    if recipe.sampling.is_guided():
        texts += negatives(model, recipe.sampling, [*data.prompts, *shown])
    return list(dict.fromkeys(texts))


def samples_of(data: TrainingData) -> list[Sample]:
    return [*data.samples, *data.held_out]


def drop_idle_encoders(model: DiffusionModel, texts: TextCache, needed: Iterable[Text]) -> bool:
    """Free the text encoders if the disk has all that is needed; whether it has."""
    for text in needed:
        LIVENESS.advance()  # a file each, and storages are slow
        if not texts.stored(text):
            return False
    model.drop_text_encoders()
    return True


class Filler:
    """Computes one rank's share of what a recipe keeps on disk."""

    def __init__(self, recipe: Recipe, model: DiffusionModel, data: TrainingData, rank: int, world_size: int) -> None:
        self._recipe, self._model = recipe, model
        self._texts = text_cache(recipe, model, data)
        self._latents = latent_cache(recipe, model)
        self._buckets = buckets_of(recipe, model)
        self._my_texts = needed_texts(recipe, model, data)[rank::world_size]
        self._my_samples = samples_of(data)[rank::world_size] if self._latents is not None else []
        self._max_bad = recipe.data.max_bad_fraction * len(samples_of(data))

    def fill(self, *, show: bool) -> dict[str, int]:
        """Write what is missing: how many entries are `new`, were `kept`, and how many media are `bad`.

        `show`: with a progress bar. Raises DataError when more media than data.max_bad_fraction allows are bad.
        """
        self._counts = Counter(new=0, kept=0, bad=0)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
            for text in progress.track(self._my_texts, description="texts"):
                self._count(new=not self._texts.stored(text))
                self._texts.encode([text])
            if self._latents is not None:
                for part in progress.track(list(chunks(self._my_samples, NUM_AHEAD)), description="latents"):
                    self._fill_latents(part, self._latents)
        return dict(self._counts)

    def _count(self, *, new: bool) -> None:
        self._counts["new" if new else "kept"] += 1

    def _fill_latents(self, samples: Sequence[Sample], cache: LatentCache) -> None:
        """Decode side by side, encode one by one: the last bits of a latent depend on what is encoded with it."""

        def load(media: Media) -> tuple[Framing, npt.NDArray[np.uint8] | None]:
            framing = self._buckets.framing_of(media)
            with decoding(media):
                return framing, None if cache.holds(media, framing) else load_media(media, framing, centre)

        with ThreadPoolExecutor(self._recipe.data.workers) as pool:
            futures = [pool.submit(load, sample.media) for sample in samples]
            for sample, future in zip(samples, futures, strict=True):
                try:
                    framing, pixels = future.result()
                except BadMedia as failure:
                    self._reject(failure)
                    continue
                if pixels is not None:
                    cache.write(sample.media, framing, self._model.encode_media([pixels])[0])
                self._count(new=pixels is not None)

    def _reject(self, failure: BadMedia) -> None:
        self._counts["bad"] += 1
        log.warning("skipped %s", failure)
        if self._counts["bad"] > self._max_bad:
            raise DataError(
                f"{self._counts['bad']} media cannot be used, more than data.max_bad_fraction "
                f"{self._recipe.data.max_bad_fraction:g} of them; the last: {failure}"
            )
