"""The first frames of media that samples are given: encoded once, at the place where a video of the run has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wfm_ds.data.buckets import Buckets
from wfm_ds.data.datasets import TrainingData, buckets_of, inputs_of, readable
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing, centre
from wfm_ds.data.replica import chosen_once
from wfm_ds.data.samples import Media, Sample
from wfm_ds.models.conditional_frames import padded
from wfm_ds.run.job import Job
from wfm_ds.types import ConditionalFrames, Prompt


class FirstFrames:
    """The frames that validation draws begin with: equal for equal recipes, at any step and world size.

    Where a run gives its samples different numbers of them, the draws take these numbers in turn, the largest first.
    """

    def __init__(self, job: Job, samples: Sequence[Sample], framing: Framing) -> None:
        """`samples`: those whose prompts are drawn; they were read once, with this framing."""
        low, high = job.recipe.algorithm.num_conditional_frames
        self.job, self.framing = job, framing
        self.media = {sample.prompt.id: sample.media for sample in samples}
        self.counts = {sample.prompt.id: high - k % (high - low + 1) for k, sample in enumerate(samples)}
        self._latents: dict[str, Tensor] = {}  # on the host, of prompts that this rank has drawn

    def of(self, prompts: Sequence[Prompt]) -> ConditionalFrames:
        """Return the frames of samples of these prompts, on the device. Collective in the replica."""
        latents = torch.stack([self._of(prompt.id) for prompt in prompts]).to(self.job.world.device)
        return ConditionalFrames(latents, torch.tensor([self.counts[prompt.id] for prompt in prompts]))

    def _of(self, prompt_id: str) -> Tensor:
        """[C,T,h,w] float32."""
        if prompt_id not in self._latents:
            world = self.job.world
            found = medium_latents(self.job, self.media[prompt_id], self.framing) if world.is_leader else None
            self._latents[prompt_id] = padded(world.share_tensor(found).cpu(), self.job.sampler.latent_shape[1])
        return self._latents[prompt_id]


def first_frames(job: Job, data: TrainingData) -> tuple[Sequence[Prompt], FirstFrames | None]:
    """Return the prompts that validation draws, with what their clips are told, and the frames that they begin with;
    None in a run that gives none, or whose draws are of texts alone. Collective."""
    recipe = job.recipe
    gives = recipe.algorithm.num_conditional_frames[1] > 0
    if recipe.validation.prompts is not None or not (gives or recipe.data.inputs):
        return data.shown, None
    inputs = inputs_of(recipe, job.model, data)
    wanted = {prompt.id for prompt in data.shown}
    samples = [sample for sample in data.held_out or data.samples if sample.prompt.id in wanted]
    samples = list({sample.prompt.id: sample for sample in samples}.values())  # a set of many draws repeats its own
    # Samples are drawn at one size, whatever sizes the data is trained at.
    size = Buckets(buckets_of(recipe, job.model).framings[0], [(recipe.sampling.height, recipe.sampling.width)])

    def choose() -> list[Sample]:
        return readable(
            samples, recipe, size, len(samples), whole=data.num_samples, what="samples to draw", inputs=inputs
        )

    chosen = chosen_once(job.world, samples, choose)
    pins = job.model.pinned(recipe.algorithm.num_conditional_frames)[1] > 0
    frames = FirstFrames(job, chosen, size.framings[0]) if pins else None
    return [sample.prompt for sample in chosen], frames


def medium_latents(job: Job, media: Media, framing: Framing) -> Tensor:
    """Clean latents [...] of a medium, read and encoded unless the run keeps them.

    Raises DataError, on this rank alone, if the file can no longer be read: replicas read different numbers of
    samples, so they have no moment to agree on it.
    """
    cache = job.latents
    latents = None if cache is None else cache.read(media, framing)
    if latents is None:
        latents = job.model.encode_media([load_media(media, framing, centre)])[0]
        if cache is not None:
            cache.write(media, framing, latents)
    return latents.to(job.world.device)
