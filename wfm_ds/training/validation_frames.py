"""Prompts and conditioning frames of validation samples, and clean latents of single images or videos."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wfm_ds.data.batch_reader import choose_on_leader
from wfm_ds.data.buckets import Buckets
from wfm_ds.data.datasets import TrainingData, build_buckets, find_usable_samples
from wfm_ds.data.inputs import InputReader
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.samples import Media, Sample
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.runs.job import Job
from wfm_ds.types import ConditioningFrames, Prompt


class ValidationFrames:
    """The conditioning frames of validation samples. They do not depend on the step or the number of ranks.

    The frames of a prompt are encoded at first use and kept in host memory. If the recipe allows several frame counts,
    successive samples use them in turn, from the largest to the smallest.
    """

    def __init__(self, job: Job, samples: Sequence[Sample], framing: Framing) -> None:
        """samples: data samples of the validation prompts. The caller has checked that they can be read."""
        low, high = job.recipe.algorithm.conditioning_frame_range
        self.job, self.framing = job, framing
        self.media = {sample.prompt.id: sample.media for sample in samples}
        self.frame_counts = {sample.prompt.id: high - k % (high - low + 1) for k, sample in enumerate(samples)}
        self._latents: dict[str, Tensor] = {}  # on the host, by prompt id

    def load_frames(self, prompts: Sequence[Prompt]) -> ConditioningFrames:
        """Return the conditioning frames of these prompts on the device. Collective in the replica."""
        latents = torch.stack([self._prompt_latents(prompt.id) for prompt in prompts]).to(self.job.world.device)
        return ConditioningFrames(latents, torch.tensor([self.frame_counts[prompt.id] for prompt in prompts]))

    def _prompt_latents(self, prompt_id: str) -> Tensor:
        """Return a prompt's latents [C,T,h,w] as float32 on the CPU. Collective in the replica.

        T is the number of latent frames of a whole video. Shorter latents are padded.
        """
        if prompt_id not in self._latents:
            world = self.job.world
            latents = load_media_latents(self.job, self.media[prompt_id], self.framing) if world.is_leader else None
            self._latents[prompt_id] = pad_num_frames(
                world.broadcast_tensor_in_replica(latents).cpu(), self.job.sampler.latent_shape[1]
            )
        return self._latents[prompt_id]


def load_validation_prompts(job: Job, data: TrainingData) -> tuple[Sequence[Prompt], ValidationFrames | None]:
    """Return the validation prompts with their inputs (actions, cameras), and their conditioning frames. Collective.

    The conditioning frames are None if the run does not use them or if validation.prompts is set.
    """
    recipe = job.recipe
    uses_frames = recipe.algorithm.conditioning_frame_range[1] > 0
    if recipe.validation.prompts is not None or not (uses_frames or recipe.data.inputs):
        return data.validation_prompts, None
    inputs = InputReader.from_recipe(recipe, job.model, data.actions)
    prompt_ids = {prompt.id for prompt in data.validation_prompts}
    samples = [sample for sample in data.held_out or data.samples if sample.prompt.id in prompt_ids]
    samples = list({sample.prompt.id: sample for sample in samples}.values())  # weighted data sets repeat samples
    # Validation samples have one size, even if training uses several.
    size = Buckets(build_buckets(recipe, job.model).framings[0], [(recipe.sampling.height, recipe.sampling.width)])

    def choose_samples() -> list[Sample]:
        return find_usable_samples(
            samples, recipe, size, len(samples), dataset_size=data.num_samples, what="validation samples", inputs=inputs
        )

    chosen = choose_on_leader(job.world, samples, choose_samples)
    pins = job.model.clean_frame_range(recipe.algorithm.conditioning_frame_range)[1] > 0
    frames = ValidationFrames(job, chosen, size.framings[0]) if pins else None
    return [sample.prompt for sample in chosen], frames


def load_media_latents(job: Job, media: Media, framing: Framing) -> Tensor:
    """Return the clean latents of an image or video. They are read from the cache or encoded from the file.

    If the file cannot be read, raises DataError on this rank only. Ranks cannot agree on the error, because replicas
    read different numbers of samples.
    """
    cache = job.latent_cache
    latents = None if cache is None else cache.read(media, framing)
    if latents is None:
        latents = job.model.encode_uint8([load_media(media, framing, draw_centre)])[0]
        if cache is not None:
            cache.write(media, framing, latents)
    return latents.to(job.world.device)
