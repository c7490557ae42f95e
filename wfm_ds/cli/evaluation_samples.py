"""Inputs of `wfm evaluate` (prompts, conditioning frames, recordings), and the scores of each generated clip."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wfm_ds.cli.samplers import SampleClip
from wfm_ds.data.datasets import TrainingData, load_data
from wfm_ds.errors import UserError
from wfm_ds.evaluation.results import SampleScores
from wfm_ds.models.sampler import Sampler
from wfm_ds.recipe.file import load_recipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.rollout.rewards import RewardClient, Scores
from wfm_ds.runs.model_loading import check_conditioning_frames, check_data_inputs
from wfm_ds.training import validation_frames
from wfm_ds.training.clip_scoring import ClipScoring, GeneratedClip, clip_id, merge_scores
from wfm_ds.training.validation_frames import ValidationSamples
from wfm_ds.types import Prompt

MAX_SCORING_BATCH = 16  # samples or clips per reward request


def load_data_recipe(path: Path) -> Recipe:
    """Load the recipe that --data names. Raises UserError if its validation samples are only texts."""
    recipe = load_recipe(path)
    has_images = recipe.algorithm.conditioning_frame_range[1] > 0 or recipe.data.media_inputs
    if not has_images or recipe.validation.prompts is not None:
        raise UserError(
            f"--data: the validation samples of {path} have no frames, input images or videos; use --prompts"
        )
    return recipe


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The validation data of the recipe that --data names."""

    recipe: Recipe
    data: TrainingData

    @classmethod
    def load(cls, recipe: Recipe, args: argparse.Namespace) -> EvaluationData:
        size = {"height": args.height, "width": args.width, "num_frames": args.frames, "fps": args.fps}
        sampling = recipe.sampling.model_copy(update=size)
        validation = recipe.validation.model_copy(update={"clips": args.clips})
        recipe = recipe.model_copy(update={"sampling": sampling, "validation": validation})
        return cls(recipe, load_data(recipe))

    def choose_samples(self, sampler: Sampler) -> ValidationSamples:
        recipe, model = self.recipe, sampler.model
        try:
            check_data_inputs(recipe, model)
            check_conditioning_frames(recipe, model, sampler.latent_shape)
            layout = validation_frames.validation_layout(recipe, sampler)
        except UserError as error:
            raise UserError(f"--data: the recipe does not fit {model.path}: {error}") from error
        framing = validation_frames.validation_framing(recipe, model, layout, covers_samples=True)
        samples = validation_frames.choose_validation_samples(recipe, model, self.data, framing, layout)
        encode = functools.partial(validation_frames.encode_media, model, framing)
        uses_frames = recipe.algorithm.conditioning_frame_range[1] > 0
        return ValidationSamples.from_data(
            recipe, sampler, samples, framing, layout, encode, keeps_recordings=uses_frames
        )


class SampleScoring:
    """Scores each clip of generated samples by rewards and, if `samples` has recordings, by similarity to them.

    Call `add` for each sample, `submit` after the last sample, and then `collect`.
    """

    def __init__(self, rewards: RewardClient, samples: ValidationSamples, sampler: Sampler, num_clips: int) -> None:
        self.rewards, self.samples, self.num_clips = rewards, samples, num_clips
        self.scoring = ClipScoring(
            sampler=sampler, layout=samples.layout, scorers=[rewards], recordings=samples.recordings
        )
        self._clips: list[GeneratedClip] = []  # not submitted yet
        self._scores: Scores = {}  # scores that do not come from the reward service
        self._recorded: tuple[str, npt.NDArray[np.uint8] | str | None] = "", None  # prompt id and its recording

    def add(self, index: int, prompt: Prompt, clips: Sequence[SampleClip]) -> None:
        recordings = self.samples.recordings
        if recordings is not None and self._recorded[0] != prompt.id:  # the seeds of a prompt follow each other
            self._recorded = prompt.id, recordings.load(prompt.id)
        self._clips += [
            GeneratedClip(
                sample_id=str(index),
                clip=k,
                prompt=clip.prompt,
                pixels=clip.pixels,
                is_finite=clip.is_finite,
                recorded=self._recorded[1],
                sound=clip.sound,
            )
            for k, clip in enumerate(clips)
        ]
        if len(self._clips) >= MAX_SCORING_BATCH:
            self.submit()

    def submit(self) -> None:
        clips, self._clips = self._clips, []
        if clips:
            self._scores = merge_scores(self._scores, self.scoring.submit(clips))

    def collect(self, num_samples: int) -> list[SampleScores]:
        """Wait for the rewards, and return one list per clip number with the scores of all samples."""
        scores = merge_scores(self.rewards.wait(), self._scores)
        return [[scores[clip_id(str(i), k)] for i in range(num_samples)] for k in range(self.num_clips)]
