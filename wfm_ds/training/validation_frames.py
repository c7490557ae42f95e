"""Prompts, conditioning frames and recordings of validation samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wfm_ds.data.batch_reader import choose_on_leader
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.data.datasets import TrainingData, build_buckets, find_usable_samples
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import IMAGE_SUFFIXES, Media, Sample
from wfm_ds.evaluation.recordings import Recordings
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.clips import choose_clip_layout
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.job import Job
from wfm_ds.types import ConditioningFrames, Prompt


class ValidationFrames:
    """The conditioning frames of validation samples. They do not depend on the step or the number of ranks."""

    def __init__(
        self, sampler: Sampler, samples: Sequence[Sample], counts: Mapping[str, int], encode: Callable[[Media], Tensor]
    ) -> None:
        """samples: readable data samples of the validation prompts.

        counts: {prompt id: number of conditioning latent frames}. encode: function that returns clean latents.
        """
        self.sampler, self.counts, self.encode = sampler, counts, encode
        self.media = {sample.prompt.id: sample.media for sample in samples}
        self._latents: dict[str, Tensor] = {}  # on the host, by prompt id

    def load_frames(self, prompts: Sequence[Prompt]) -> ConditioningFrames:
        """Return the conditioning frames of these prompts on the device.

        If all ranks must call `encode`, all ranks must call this method too.
        """
        latents = torch.stack([self._prompt_latents(prompt.id) for prompt in prompts]).to(self.sampler.model.device)
        return ConditioningFrames(latents, torch.tensor([self.counts[prompt.id] for prompt in prompts]))

    def _prompt_latents(self, prompt_id: str) -> Tensor:
        """Return a prompt's latents [C,T,h,w] as float32 on the CPU, padded to the T latent frames of a whole video."""
        if prompt_id not in self._latents:
            latents = self.encode(self.media[prompt_id]).cpu()
            self._latents[prompt_id] = pad_num_frames(latents, self.sampler.latent_shape[1])
        return self._latents[prompt_id]


def count_conditioning_frames(recipe: Recipe, samples: Sequence[Sample], *, has_recordings: bool) -> dict[str, int]:
    """Return {prompt id: number of conditioning latent frames}.

    If the recipe allows several numbers, successive samples use them in turn, from the largest to the smallest. With
    several clips (validation.clips), all samples use the largest. The number is at least 1 if samples are compared with
    recordings.
    """
    low, high = recipe.algorithm.conditioning_frame_range
    low = max(low, int(has_recordings)) if recipe.validation.clips == 1 else high
    return {sample.prompt.id: high - k % (high - low + 1) for k, sample in enumerate(samples)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSamples:
    """The prompts of validation samples, with their inputs, and the data that the samples are compared with."""

    prompts: Sequence[Prompt]  # with the inputs (actions, cameras) of all clips
    frames: ValidationFrames | None = None  # None: the run does not use them, or validation.prompts is set
    layout: ClipLayout
    recordings: Recordings | None = None  # None if they are not needed, or if the data has no videos

    @classmethod
    def from_data(
        cls,
        recipe: Recipe,
        sampler: Sampler,
        samples: Sequence[Sample],
        framing: Framing,
        layout: ClipLayout,
        encode: Callable[[Media], Tensor],
        *,
        keeps_recordings: bool,
    ) -> ValidationSamples:
        """Create the validation samples from usable data samples.

        encode: function that returns clean latents. keeps_recordings: whether to keep the recorded videos.
        """
        recordings = None
        if keeps_recordings:
            recordings = Recordings.from_samples(samples, framing, layout, recipe.validation.clips)
        counts = count_conditioning_frames(recipe, samples, has_recordings=recordings is not None)
        has_frames = sampler.model.clean_frame_range(recipe.algorithm.conditioning_frame_range)[1] > 0
        return cls(
            prompts=[sample.prompt for sample in samples],
            frames=ValidationFrames(sampler, samples, counts, encode) if has_frames else None,
            layout=layout,
            recordings=recordings,
        )


def load_validation_samples(job: Job, data: TrainingData, *, needs_recordings: bool) -> ValidationSamples:
    """Return the validation prompts with their inputs, conditioning frames and recordings. All ranks must call this.

    needs_recordings: whether a reward compares samples with recordings. With several clips, recordings are always kept.
    """
    recipe, num_clips = job.recipe, job.recipe.validation.clips
    layout = validation_layout(recipe, job.sampler)
    uses_frames = recipe.algorithm.conditioning_frame_range[1] > 0
    if recipe.validation.prompts is not None or not (uses_frames or recipe.data.inputs):
        return ValidationSamples(prompts=data.validation_prompts, layout=layout)
    needs_recordings = needs_recordings or num_clips > 1
    framing = validation_framing(recipe, job.model, layout, covers_samples=needs_recordings)
    samples = list_validation_samples(data)

    def choose_samples() -> list[Sample]:
        return choose_validation_samples(recipe, job.model, data, framing, layout)

    chosen = choose_on_leader(job.world, samples, choose_samples)
    encode = functools.partial(encode_in_replica, job, framing)
    return ValidationSamples.from_data(
        recipe, job.sampler, chosen, framing, layout, encode, keeps_recordings=uses_frames and needs_recordings
    )


def has_recorded_videos(recipe: Recipe, data: TrainingData) -> bool:
    """Return whether validation samples continue recorded videos."""
    continues = recipe.algorithm.conditioning_frame_range[1] > 0 and recipe.validation.prompts is None
    return continues and any(sample.media.suffix not in IMAGE_SUFFIXES for sample in list_validation_samples(data))


def validation_layout(recipe: Recipe, sampler: Sampler) -> ClipLayout:
    """Return the layout of the clips of validation samples. Clips overlap by the maximum number of conditioning frames.

    Raises ModelError if the recipe has conditioning frames, but the model cannot continue clips.
    """
    num_latents = recipe.algorithm.conditioning_frame_range[1]
    if num_latents == 0:
        return ClipLayout(recipe.sampling.num_frames)
    return choose_clip_layout(sampler.model, recipe.sampling, num_latents)


def validation_framing(recipe: Recipe, model: DiffusionModel, layout: ClipLayout, *, covers_samples: bool) -> Framing:
    """Return the framing of validation samples. They all have the same size, even if training uses several sizes.

    covers_samples: whether to skip videos that have fewer frames than a validation sample.
    """
    size, num_frames = recipe.sampling, layout.total_frames(recipe.validation.clips)
    framing = replace(build_buckets(recipe, model).framings[0], height=size.height, width=size.width)
    is_short = covers_samples and framing.num_frames < num_frames
    return replace(framing, span=num_frames) if is_short else framing


def list_validation_samples(data: TrainingData) -> list[Sample]:
    prompt_ids = {prompt.id for prompt in data.validation_prompts}
    samples = [sample for sample in data.held_out or data.samples if sample.prompt.id in prompt_ids]
    return list({sample.prompt.id: sample for sample in samples}.values())  # weighted data sets repeat samples


def choose_validation_samples(
    recipe: Recipe, model: DiffusionModel, data: TrainingData, framing: Framing, layout: ClipLayout
) -> list[Sample]:
    """Return the usable validation samples. The inputs of their prompts, such as actions, cover all clips.

    Raises DataError if too many samples are invalid.
    """
    samples, inputs = list_validation_samples(data), InputReader.from_recipe(recipe, model, data.actions)
    if inputs is not None and recipe.validation.clips > 1:
        inputs = layout.extend_reader(inputs, recipe.validation.clips)
    size = Buckets(framing, [(framing.height, framing.width)])
    return find_usable_samples(
        samples, recipe, size, len(samples), dataset_size=data.num_samples, what="validation samples", inputs=inputs
    )


def encode_in_replica(job: Job, framing: Framing, media: Media) -> Tensor:
    """Return the clean latents of an image or video. All ranks of the replica must call this."""
    latents = load_media_latents(job, media, framing) if job.world.is_leader else None
    return job.world.broadcast_tensor_in_replica(latents)


def load_media_latents(job: Job, media: Media, framing: Framing) -> Tensor:
    """Return the clean latents of an image or video, from the cache or encoded from the file.

    If the file cannot be read, raises DataError on this rank only.
    """
    cache = job.latent_cache
    latents = None if cache is None else cache.read(media, framing)
    if latents is None:
        latents = encode_media(job.model, framing, media)
        if cache is not None:
            cache.write(media, framing, latents)
    return latents.to(job.world.device)


def encode_media(model: DiffusionModel, framing: Framing, media: Media) -> Tensor:
    """Return the clean latents of the centre crop of an image or video. Raises BadMedia if it cannot be decoded."""
    return model.encode_uint8([load_media(media, framing, draw_centre)])[0]
