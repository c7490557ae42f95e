"""Caches of texts and media on disk, and the texts that a run will ask for."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from wfm_ds.data.buckets import Size
from wfm_ds.data.cosmos import SAFE_SUFFIX
from wfm_ds.data.datasets import TrainingData, buckets_of
from wfm_ds.data.embeddings import read_pickle
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import BadMedia, Framing, centre, decoding
from wfm_ds.data.prompts import PromptOrder
from wfm_ds.data.samples import Media, Sample, file_identity
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.captions import Text, captioned
from wfm_ds.models.latent_cache import LatentCache
from wfm_ds.models.sampler import negatives
from wfm_ds.models.text_cache import TextCache
from wfm_ds.models.text_store import text_store
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.tensor_store import TensorStore
from wfm_ds.types import Prompt

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


def text_cache(recipe: Recipe, model: DiffusionModel, data: TrainingData, *, in_memory: bool = False) -> TextCache:
    """Open the text cache: on disk (models/text_store.py), or in memory alone where the recipe or caller says so."""
    files = {s.prompt.text: EmbeddingFile(s.embedding) for s in samples_of(data) if s.embedding}
    return TextCache(model, store=None if in_memory else text_store(recipe, model), precomputed=files)


def latent_cache(recipe: Recipe, model: DiffusionModel) -> LatentCache | None:
    if not recipe.data.cache_latents:
        return None
    assert recipe.data.cache_dir is not None  # the recipe is checked
    return LatentCache(model, TensorStore(recipe.data.cache_dir / "latents"))


def needed_texts(recipe: Recipe, model: DiffusionModel, data: TrainingData) -> list[Text]:
    """Every text that the run will encode, once."""
    shown = data.shown[: recipe.validation.num_prompts]
    drawn = drawn_prompts(recipe, data)
    by_size = defaultdict[Size, list[Text]](list)
    by_size[recipe.sampling.height, recipe.sampling.width] += [prompt.text for prompt in [*drawn, *shown]]
    dropped = [NegativeText("")] if data.samples and recipe.data.caption_dropout > 0 else []
    guided = recipe.sampling.is_guided()
    if guided:
        texts = negatives(model, recipe.sampling, [*drawn, *shown])
        by_size[recipe.sampling.height, recipe.sampling.width] += texts
    for size, samples in samples_by_size(recipe, model, data).items():
        prompts = [sample.prompt for sample in samples]
        by_size[size] += [*(prompt.text for prompt in prompts), *dropped]
        if guided and recipe.is_rl:
            by_size[size] += negatives(model, recipe.sampling, prompts)
    found = [captioned(model, texts, size, recipe.sampling.num_frames) for size, texts in by_size.items()]
    return list(dict.fromkeys(itertools.chain(*found)))


def samples_by_size(recipe: Recipe, model: DiffusionModel, data: TrainingData) -> Mapping[Size, Sequence[Sample]]:
    """The samples of a run by the size that they are framed to; all under one where captions do not state it."""
    buckets, samples = buckets_of(recipe, model), samples_of(data)
    if len({model.caption("", *size, recipe.sampling.num_frames) for size in buckets.sizes}) == 1:
        return {buckets.sizes[0]: samples}
    found = defaultdict[Size, list[Sample]](list)
    for sample in samples:
        found[buckets.sizes[buckets.index_of(sample.media)]].append(sample)
    return found


def drawn_prompts(recipe: Recipe, data: TrainingData) -> list[Prompt]:
    """The prompts that an RL run about prompts alone asks for, each once; all prompts where rewards choose among them,
    and all captions of a run about media, where a bad file has a substitute."""
    by_reward = recipe.data.choose == "spread" or (recipe.is_rl and recipe.rl.rollout.max_refills > 0)
    if not data.prompts or data.samples or by_reward:
        return data.prompts
    order = PromptOrder(data.prompts, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    count = min(recipe.run.steps * recipe.rl.rollout.prompts_per_step, len(data.prompts))
    return list({prompt.id: prompt for prompt in order.prompts(1, count)}.values())


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
        self._max_bad = recipe.data.max_bad_fraction * sum(len(sample.all_media) for sample in samples_of(data))

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

        def load(sample: Sample, media: Media) -> tuple[Framing, npt.NDArray[np.uint8] | None]:
            framing = self._buckets.framing_of(sample.media)
            with decoding(media):
                return framing, None if cache.holds(media, framing) else load_media(media, framing, centre)

        all_media = [(sample, media) for sample in samples for media in sample.all_media]
        with ThreadPoolExecutor(self._recipe.data.workers) as pool:
            futures = [pool.submit(load, sample, media) for sample, media in all_media]
            for (_, media), future in zip(all_media, futures, strict=True):
                try:
                    framing, pixels = future.result()
                except BadMedia as failure:
                    self._reject(failure)
                    continue
                if pixels is not None:
                    cache.write(media, framing, self._model.encode_media([pixels])[0])
                self._count(new=pixels is not None)

    def _reject(self, failure: BadMedia) -> None:
        self._counts["bad"] += 1
        log.warning("skipped %s", failure)
        if self._counts["bad"] > self._max_bad:
            raise DataError(
                f"{self._counts['bad']} media cannot be used, more than data.max_bad_fraction "
                f"{self._recipe.data.max_bad_fraction:g} of them; the last: {failure}"
            )
