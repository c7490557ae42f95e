"""Disk caches of text embeddings and latents. Also encodes the texts of a run before the engine is built."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wfm_ds.chunks import split_into_chunks
from wfm_ds.data.batch_reader import TrainingSample
from wfm_ds.data.buckets import ImageSize
from wfm_ds.data.captioned_folder import SAFE_SUFFIX
from wfm_ds.data.datasets import TrainingData, build_buckets
from wfm_ds.data.embeddings import read_pickle
from wfm_ds.data.media import load_media
from wfm_ds.data.order import PromptOrder
from wfm_ds.data.pixels import BadMedia, Framing, convert_decode_errors, draw_centre
from wfm_ds.data.samples import Media, Sample, file_identity
from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.distributed.progress import ProgressDisplay, track_progress
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.memory.activations import text_bytes
from wfm_ds.models.assets.latent_cache import LatentCache
from wfm_ds.models.assets.text_cache import (
    PromptText,
    Text,
    TextCache,
    create_text_store,
    format_prompts,
    prompt_text,
    remove_unused_folders,
)
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.sampler import negative_texts
from wfm_ds.recipe.run_sizes import RunSizes, derive_run_sizes
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.tensor_store import TensorStore
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import Prompt, SoundClip

if TYPE_CHECKING:
    from wfm_ds.runs.job import Job

log = logging.getLogger(__name__)

MAX_DECODED_MEDIA = 16  # maximum number of images or videos in memory
MAX_EMBEDDING_BYTES = 64 * 2**30  # maximum size on disk of automatically precomputed embeddings
MAX_TEXTS_PER_DRAW = 2  # maximum number of precomputed texts per drawn sample; more would mostly stay unused
PRECOMPUTE_HINT = "set data.cache_dir and run wfm data prepare"


@dataclass(frozen=True, slots=True)
class CaptionEmbeddingFile:
    """File with the precomputed text embedding of a caption: an array [number of tokens, embedding size]."""

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
            raise DataError(f"{self.path} must hold exactly one tensor [tokens, embedding size]")
        return next(iter(tensors.values()))


def open_text_cache(recipe: Recipe, model: DiffusionModel, data: TrainingData, *, in_memory: bool = False) -> TextCache:
    """Open the text embedding cache. It is in memory if `in_memory` is True or the recipe turns the disk cache off."""
    files = {s.prompt.text: CaptionEmbeddingFile(s.embedding) for s in all_samples(data) if s.embedding}
    return TextCache(model, store=None if in_memory else create_text_store(recipe, model), precomputed=files)


def open_latent_cache(recipe: Recipe, model: DiffusionModel) -> LatentCache | None:
    """Open the disk cache of VAE latents. Returns None unless data.cache_latents is set."""
    if not recipe.data.cache_latents:
        return None
    assert recipe.data.cache_dir is not None  # checked by the recipe
    return LatentCache(model, TensorStore(recipe.data.cache_dir / "latents"))


def collect_run_texts(recipe: Recipe, model: DiffusionModel, data: TrainingData) -> list[Text]:
    """Return the formatted captions, prompts and negative prompts that the run will encode, without duplicates.

    Returns [] if the text encoder also sees images, because reading all images would take too long.
    """
    if model.text_inputs:
        return []
    validation_prompts = data.validation_prompts[: recipe.validation.num_prompts]
    prompts = [*rollout_prompts(recipe, data), *validation_prompts]
    by_size = defaultdict[ImageSize, list[PromptText]](list)
    by_size[recipe.sampling.height, recipe.sampling.width] += map(prompt_text, prompts)
    empty_caption = [NegativeText("")] if data.samples and recipe.data.caption_dropout > 0 else []
    guided = recipe.uses_guidance
    if guided:
        by_size[recipe.sampling.height, recipe.sampling.width] += negative_texts(model, recipe.sampling, prompts)
    for size, samples in group_samples_by_size(recipe, model, data).items():
        sample_prompts = [sample.prompt for sample in samples]
        by_size[size] += [*map(prompt_text, sample_prompts), *empty_caption]
        alternatives = (replace(sample.prompt, text=text) for sample in samples for text in sample.texts)
        by_size[size] += map(prompt_text, alternatives)
        if guided and recipe.is_rl:
            by_size[size] += negative_texts(model, recipe.sampling, sample_prompts)
    captions = [format_prompts(model, texts, size, recipe.sampling.num_frames) for size, texts in by_size.items()]
    return list(dict.fromkeys(itertools.chain(*captions)))


def group_samples_by_size(
    recipe: Recipe, model: DiffusionModel, data: TrainingData
) -> Mapping[ImageSize, Sequence[Sample]]:
    """Group the training and held-out samples by the image size (height, width) of their bucket.

    Returns a single group if the model's caption format does not contain the image size.
    """
    buckets, samples = build_buckets(recipe, model), all_samples(data)
    if len({model.format_prompt("", *size, recipe.sampling.num_frames) for size in buckets.sizes}) == 1:
        return {buckets.sizes[0]: samples}
    by_size = defaultdict[ImageSize, list[Sample]](list)
    for sample in samples:
        by_size[buckets.sizes[buckets.choose_bucket(sample.media)]].append(sample)
    return by_size


def rollout_prompts(recipe: Recipe, data: TrainingData) -> list[Prompt]:
    """Return the prompts that an RL run may use, without duplicates."""
    depends_on_rewards = recipe.data.choose == "reward_std" or (recipe.is_rl and recipe.rl.rollout.max_refills > 0)
    if not data.prompts or data.samples or depends_on_rewards:  # any sample may replace an unreadable file
        return data.prompts
    order = PromptOrder(data.prompts, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    count = min(recipe.run.steps * recipe.rl.rollout.prompts_per_step, len(data.prompts))
    return list({prompt.id: prompt for prompt in order.step_prompts(1, count)}.values())


def all_samples(data: TrainingData) -> list[Sample]:
    return [*data.samples, *data.held_out]


def drop_unused_encoders(model: DiffusionModel, texts: TextCache, needed: Sequence[Text]) -> bool:
    """Free the text encoders if the embeddings of all `needed` texts are cached. Returns True if they were freed."""
    with track_progress(needed, "looking up texts", total=len(needed)) as tracked:
        for text in tracked:  # each look-up is a file access, slow on network storage
            if not texts.is_stored(text):
                return False
    model.drop_text_encoders()
    return True


class CacheFiller:
    """Writes text embeddings and latents to the disk caches. Each rank writes a shard of the entries."""

    def __init__(self, recipe: Recipe, model: DiffusionModel, data: TrainingData, rank: int, world_size: int) -> None:
        self._recipe, self._model = recipe, model
        self._texts = open_text_cache(recipe, model, data)
        self._latents = open_latent_cache(recipe, model)
        self._buckets = build_buckets(recipe, model)
        self._local_texts = collect_run_texts(recipe, model, data)[rank::world_size]
        self._local_samples = all_samples(data)[rank::world_size] if self._latents is not None else []
        self._max_bad = recipe.data.max_bad_fraction * sum(len(sample.all_media) for sample in all_samples(data))

    def fill_caches(self) -> dict[str, int]:
        """Write the missing entries of this rank's shard and return {outcome: number of entries}.

        The outcomes are `new`, `kept` (already cached) and `bad` (unreadable file). Raises DataError if the fraction of
        unreadable files on this rank exceeds data.max_bad_fraction.
        """
        self._counts = Counter(new=0, kept=0, bad=0)
        with track_progress(self._local_texts, "encoding texts", total=len(self._local_texts)) as tracked:
            for text in tracked:
                self._count_entry(new=not self._texts.is_stored(text))
                self._texts.encode([text])
        if self._latents is not None:
            with ProgressDisplay("encoding images or videos", len(self._local_samples)) as display:
                for part in split_into_chunks(self._local_samples, MAX_DECODED_MEDIA):
                    self._fill_latents(part, self._latents)
                    display.advance(len(part))
        return dict(self._counts)

    def _count_entry(self, *, new: bool) -> None:
        self._counts["new" if new else "kept"] += 1

    def _fill_latents(self, samples: Sequence[Sample], cache: LatentCache) -> None:
        def load_pixels(sample: Sample, media: Media) -> tuple[Framing, npt.NDArray[np.uint8] | SoundClip | None]:
            framing = self._buckets.choose_framing(sample.media)
            with convert_decode_errors(media):
                return framing, None if cache.has_latents(media, framing) else load_media(media, framing, draw_centre)

        all_media = [(sample, media) for sample in samples for media in sample.all_media]
        with ThreadPoolExecutor(self._recipe.data.workers) as pool:
            futures = [pool.submit(load_pixels, sample, media) for sample, media in all_media]
            for (_, media), future in zip(all_media, futures, strict=True):
                try:
                    framing, pixels = future.result()
                except BadMedia as failure:
                    self._reject_media(failure)
                    continue
                if pixels is not None:  # one file at a time: a latent must not depend on other files
                    cache.write(media, framing, self._model.encode_uint8([pixels])[0])
                self._count_entry(new=pixels is not None)

    def _reject_media(self, failure: BadMedia) -> None:
        self._counts["bad"] += 1
        log.warning("skipped %s", failure)
        if self._counts["bad"] > self._max_bad:
            raise DataError(
                f"{self._counts['bad']} images or videos are unreadable, more than data.max_bad_fraction "
                f"{self._recipe.data.max_bad_fraction:g} allows. Last: {failure}"
            )


def precompute_texts(
    recipe: Recipe, model: DiffusionModel, data: TrainingData, derived: RunSizes, world: World
) -> TextCache:
    """Open the run's text cache and encode the missing texts. All ranks must call this.

    Frees the text encoders unless the run still needs them. Call this after `mark_frozen_layers` and before the engine
    is built.
    """
    texts: TextCache = world.run_checked(lambda: open_text_cache(recipe, model, data))
    if texts.folder is None:
        return texts

    def open_on_disk() -> bool:
        can_be_written = texts.open_folder(required=recipe.data.cache_dir is not None)
        if can_be_written and world.local_rank == 0:
            remove_unused_folders(time.time())
        return can_be_written

    if world.any_rank(not world.run_checked(open_on_disk)):
        texts = world.run_checked(lambda: open_text_cache(recipe, model, data, in_memory=True))
        return texts
    if recipe.data.streaming:
        log.info("texts are encoded on demand: the texts of a stream are not known in advance")
        return texts
    if model.text_inputs:
        log.info("texts are encoded on demand, together with the images that the text encoder sees")
        return texts
    needed, num_new = collect_run_texts(recipe, model, data), 0.0
    if recipe.data.cache_text == "auto" and (reason := precompute_objection(recipe, model, needed, derived)) is None:
        num_new = world.sum_over_ranks(
            {"new": float(world.run_checked(lambda: encode_local_texts(texts, needed, world)))}
        )["new"]
        model.drop_text_encoders()  # all texts of this node are cached; no need to check each one again
    else:
        if recipe.data.cache_text == "auto":
            log.info("texts are encoded on demand: %s", reason)
        if not drop_unused_encoders(model, texts, needed):
            return texts
    new = f" ({num_new:.0f} new)" if num_new else ""
    log.info("all %d texts are cached in %s%s: text encoders freed", len(needed), texts.folder, new)
    return texts


def keeps_text_encoders(recipe: Recipe, model: DiffusionModel, data: TrainingData, world_size: int) -> bool:
    """Return whether a run that starts with an empty text cache would keep its text encoders in memory."""
    if recipe.data.streaming or model.text_inputs:
        return True
    if recipe.data.cache_text == "off":
        return recipe.data.cache_dir is None
    return (
        precompute_objection(
            recipe, model, collect_run_texts(recipe, model, data), derive_run_sizes(recipe, world_size)
        )
        is not None
    )


def precompute_objection(
    recipe: Recipe, model: DiffusionModel, needed: Sequence[Text], derived: RunSizes
) -> str | None:
    """Return the reason why the `needed` texts should not be encoded before training, or None."""
    num_draws = recipe.run.steps * (recipe.rl.rollout.prompts_per_step if recipe.is_rl else derived.samples_per_step)
    if len(needed) > MAX_TEXTS_PER_DRAW * num_draws + recipe.validation.num_prompts:
        return (
            f"{len(needed)} texts but the run draws only {num_draws} samples; to precompute all texts, "
            f"{PRECOMPUTE_HINT}"
        )
    size = len(needed) * text_bytes(model.text_shapes(), model.text_dtype)
    if size > MAX_EMBEDDING_BYTES:
        return (
            f"the embeddings of {len(needed)} texts take {size / 2**30:.1f} GiB, more than the limit of "
            f"{MAX_EMBEDDING_BYTES / 2**30:.0f} GiB; to precompute all texts, {PRECOMPUTE_HINT}"
        )
    return None


def encode_local_texts(texts: TextCache, needed: Sequence[Text], world: World) -> int:
    """Encode this rank's shard of the `needed` texts into the cache. Returns the number of newly encoded texts.

    Raises DataError if the cache cannot be written.
    """
    shard = needed[world.local_rank :: ranks_per_node(world.size)]
    missing = [text for text in shard if not texts.is_stored(text)]
    with track_progress(missing, "encoding texts", total=len(missing)) as tracked:
        for text in tracked:
            try:
                texts.encode([text])
            except OSError as error:
                raise DataError(
                    f"{texts.folder} cannot be written: {error}. Free space or set data.cache_dir"
                ) from error
    return len(missing)


def load_clean_latents(job: Job, samples: Sequence[TrainingSample]) -> Tensor:
    """Return the clean latents [B, ...] float32 of B samples. All ranks of the replica must call this."""
    if not job.world.is_leader:
        return job.world.broadcast_tensor_in_replica(None)
    pixels = {i: sample.pixels for i, sample in enumerate(samples) if sample.pixels is not None}
    if job.latent_cache is None:
        return job.world.broadcast_tensor_in_replica(job.model.encode_uint8(list(pixels.values())))
    # Encode one by one, as in the text cache: the last bits must not depend on the content of the cache.
    encoded_now = {i: job.model.encode_uint8([array])[0] for i, array in pixels.items()}
    for i, latents in encoded_now.items():
        media, framing = samples[i].media, samples[i].framing
        assert media is not None
        assert framing is not None
        job.latent_cache.write(media, framing, latents)
    rows = [encoded_now.get(i, sample.latents) for i, sample in enumerate(samples)]
    return job.world.broadcast_tensor_in_replica(torch.stack([copy_to_device(row, job.world.device) for row in rows]))
