"""Prompts, conditioning frames and recordings of `wfm evaluate`, and the scores of its samples clip by clip."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wfm_ds.cli.sampling_options import SampleClip, choose_layout
from wfm_ds.errors import UserError

if TYPE_CHECKING:
    from wfm_ds.data.clip_layout import ClipLayout
    from wfm_ds.data.datasets import TrainingData
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Sample
    from wfm_ds.evaluation.recordings import Recordings
    from wfm_ds.evaluation.results import SampleScores
    from wfm_ds.models.sampler import Sampler
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.rollout.rewards import RewardClient, Scores
    from wfm_ds.types import ConditioningFrames, Prompt

MAX_SCORING_BATCH = 16  # samples or clips per reward request


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The validation data of the recipe --data."""

    recipe: Recipe
    data: TrainingData

    @classmethod
    def from_options(cls, args: argparse.Namespace) -> EvaluationData:
        """Load the data. Raises UserError if its validation samples are texts."""
        from wfm_ds.data.datasets import load_data
        from wfm_ds.recipe.file import load_recipe

        recipe = load_recipe(args.data)
        if recipe.algorithm.conditioning_frame_range[1] == 0 or recipe.validation.prompts is not None:
            raise UserError(f"--data: the validation samples of {args.data} have no frames; use --prompts")
        return cls(recipe, load_data(recipe))

    def apply_options(self, args: argparse.Namespace) -> EvaluationData:
        """Return the data with the size and the number of clips in `args`."""
        size = {"height": args.height, "width": args.width, "num_frames": args.frames, "fps": args.fps}
        sampling = self.recipe.sampling.model_copy(update=size)
        validation = self.recipe.validation.model_copy(update={"clips": args.clips})
        recipe = self.recipe.model_copy(update={"sampling": sampling, "validation": validation})
        return EvaluationData(recipe, self.data)

    def choose_samples(self, sampler: Sampler) -> EvaluationSamples:
        """Return the samples that the model can be evaluated on. Raises UserError if it does not fit the recipe."""
        from wfm_ds.evaluation.recordings import Recordings
        from wfm_ds.runs.model_loading import check_conditioning_frames, check_data_inputs
        from wfm_ds.training import validation_frames

        recipe, model = self.recipe, sampler.model
        try:
            check_data_inputs(recipe, model)
            check_conditioning_frames(recipe, model, sampler.latent_shape)
            layout = validation_frames.validation_layout(recipe, sampler)
        except UserError as error:
            raise UserError(f"--data: the recipe does not fit {model.path}: {error}") from error
        framing = validation_frames.validation_framing(recipe, model, layout)
        samples = validation_frames.choose_validation_samples(recipe, model, self.data, framing, layout)
        counts = validation_frames.count_conditioning_frames(recipe, samples)
        return EvaluationSamples(
            prompts=[sample.prompt for sample in samples],
            layout=layout,
            num_clips=recipe.validation.clips,
            load_frames=FrameEncoder(sampler, samples, framing, counts).load if model.uses_clean_frames else None,
            recordings=Recordings.from_samples(samples, framing, layout, recipe.validation.clips),
        )


class FrameEncoder:
    """Encodes the conditioning frames of data samples for one model. The latents are kept on the host."""

    def __init__(self, sampler: Sampler, samples: Sequence[Sample], framing: Framing, counts: dict[str, int]) -> None:
        """counts: {prompt id: number of conditioning latent frames}."""
        self.sampler, self.framing, self.counts = sampler, framing, counts
        self.media = {sample.prompt.id: sample.media for sample in samples}
        self.latents: dict[str, npt.NDArray[np.float32]] = {}

    def load(self, prompts: Sequence[Prompt]) -> ConditioningFrames:
        import torch

        from wfm_ds.models.conditioning_frames import pad_num_frames
        from wfm_ds.training.validation_frames import encode_media
        from wfm_ds.types import ConditioningFrames

        model, num_frames = self.sampler.model, self.sampler.latent_shape[1]
        for prompt in prompts:
            if prompt.id not in self.latents:
                latents = encode_media(model, self.media[prompt.id], self.framing)
                self.latents[prompt.id] = pad_num_frames(latents, num_frames).cpu().numpy()
        stacked = torch.from_numpy(np.stack([self.latents[prompt.id] for prompt in prompts]))
        counts = torch.tensor([self.counts[prompt.id] for prompt in prompts])
        return ConditioningFrames(stacked.to(model.device), counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSamples:
    """The samples to generate with one model."""

    prompts: Sequence[Prompt]  # with the inputs of all clips
    layout: ClipLayout
    num_clips: int
    load_frames: Callable[[Sequence[Prompt]], ConditioningFrames] | None = None  # of the first clip
    recordings: Recordings | None = None

    @classmethod
    def from_texts(cls, prompts: Sequence[Prompt], sampler: Sampler, num_clips: int) -> EvaluationSamples:
        return cls(prompts=prompts, layout=choose_layout(sampler, num_clips), num_clips=num_clips)

    @property
    def key(self) -> tuple[object, ...]:
        """A value that is equal for two models if they can be compared sample by sample."""
        return [prompt.id for prompt in self.prompts], self.layout


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """One clip to score."""

    id: str
    clip: SampleClip
    reference: npt.NDArray[np.uint8] | None  # recorded frames, for rewards that compare with them


class SampleScoring:
    """Scores samples clip by clip: by rewards, and by their similarity to recordings."""

    def __init__(self, rewards: RewardClient, samples: EvaluationSamples, sampler: Sampler) -> None:
        self.rewards, self.samples, self.sampler = rewards, samples, sampler
        self._rows: list[ScoringRow] = []  # not submitted yet
        self._scores: Scores = {}  # those that do not come from the reward service
        self._recorded: tuple[str, npt.NDArray[np.uint8] | str] = "", ""  # prompt id and recording of the last sample

    def add(self, index: int, prompt: Prompt, clips: Sequence[SampleClip]) -> None:
        """Add the clips of sample `index`. They are submitted if there are enough of them."""
        from wfm_ds.models.clips import reconstruct_clip
        from wfm_ds.rollout.rewards import NOT_FINITE
        from wfm_ds.training.validation import clip_id

        recordings = self.samples.recordings
        if recordings is not None and self._recorded[0] != prompt.id:  # the seeds of a prompt follow each other
            self._recorded = prompt.id, recordings.load(prompt.id)
        recorded = self._recorded[1]
        for k, clip in enumerate(clips):
            sample_id, reference = clip_id(str(index), k), None
            if self.rewards.needs_reference and not isinstance(recorded, str):
                reference = reconstruct_clip(self.sampler, recorded, self.samples.layout, k)
            self._rows.append(ScoringRow(sample_id, clip, reference))
            if recordings is not None:
                known = recorded if clip.is_finite else NOT_FINITE
                self._scores[sample_id] = recordings.score_clip(sample_id, clip.pixels, k, known)
        if len(self._rows) >= MAX_SCORING_BATCH:
            self.submit()

    def submit(self) -> None:
        """Submit the clips that were added since the last call to the reward service."""
        from wfm_ds.rollout.rewards import submit_finite_samples
        from wfm_ds.training.validation import merge_scores

        rows, self._rows = self._rows, []
        if not rows:
            return
        failed = submit_finite_samples(
            self.rewards,
            np.stack([row.clip.pixels for row in rows]),
            [row.clip.is_finite for row in rows],
            [row.id for row in rows],
            [row.clip.prompt for row in rows],
            self.sampler.settings.fps if self.sampler.model.is_video else None,
            [row.reference for row in rows],
        )
        self._scores = merge_scores(self._scores, failed)

    def collect(self, num_samples: int) -> list[SampleScores]:
        """Wait for the rewards. Returns the scores of all samples for each clip."""
        from wfm_ds.training.validation import clip_id, merge_scores

        scores = merge_scores(self.rewards.wait(), self._scores)
        return [[scores[clip_id(str(i), k)] for i in range(num_samples)] for k in range(self.samples.num_clips)]
