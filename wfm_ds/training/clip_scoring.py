"""Scores generated clips by rewards and by their similarity to recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wfm_ds.data.clip_layout import ClipLayout
from wfm_ds.evaluation.recordings import Recordings
from wfm_ds.models.clips import reconstruct_clip
from wfm_ds.models.sampler import Sampler
from wfm_ds.rollout.rewards import NOT_FINITE, RewardClient, Scores, submit_finite_samples
from wfm_ds.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedClip:
    sample_id: str
    clip: int
    prompt: Prompt  # with the inputs of this clip
    pixels: npt.NDArray[np.uint8]  # [F,H,W,3], or an image [H,W,3]
    is_finite: bool
    recorded: npt.NDArray[np.uint8] | str | None = None  # result of Recordings.load; None if not needed
    sound: npt.NDArray[np.float32] | None = None  # [channels, samples]

    @property
    def id(self) -> str:
        return clip_id(self.sample_id, self.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipScoring:
    """Submits clips to reward clients and measures the similarity of the clips to recordings."""

    sampler: Sampler
    layout: ClipLayout
    scorers: Sequence[RewardClient]
    recordings: Recordings | None = None  # computes the similarity of clips to their recording; None: not measured

    @property
    def needs_recordings(self) -> bool:
        return self.recordings is not None or any(client.reference_rewards for client in self.scorers)

    def submit(self, clips: Sequence[GeneratedClip]) -> Scores:
        """Submit clips to the reward clients.

        Returns failed scores of clips with non-finite latents, and the similarity of clips to recordings.
        """
        fps = self.sampler.settings.fps if self.sampler.model.is_video else None
        references = self._load_references(clips)
        sounds = [clip.sound for clip in clips if clip.sound is not None]
        scores: Scores = {}
        for client in self.scorers:
            failed = submit_finite_samples(
                client,
                np.stack([clip.pixels for clip in clips]),
                [clip.is_finite for clip in clips],
                [clip.id for clip in clips],
                [clip.prompt for clip in clips],
                fps,
                references,
                np.stack(sounds) if sounds else None,
                self.sampler.model.sound_rate,
            )
            scores = merge_scores(scores, failed)
        if self.recordings is None:
            return scores
        for clip in clips:
            assert clip.recorded is not None, "needs_recordings is set"
            recorded = clip.recorded if clip.is_finite else NOT_FINITE
            similarity = self.recordings.score_clip(clip.id, clip.pixels, clip.clip, recorded)
            scores = merge_scores(scores, {clip.id: similarity})
        return scores

    def _load_references(self, clips: Sequence[GeneratedClip]) -> list[npt.NDArray[np.uint8] | str | None]:
        """Return for each clip the recorded frames that it should show, or the reason why they cannot be read.

        If no reward needs the frames, returns None for each clip.
        """
        if not any(client.reference_rewards for client in self.scorers):
            return [None] * len(clips)
        reconstructed: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}  # samples of a prompt share its recording
        references: list[npt.NDArray[np.uint8] | str | None] = []
        for clip in clips:
            reference = clip.recorded
            if isinstance(reference, np.ndarray):
                key = id(reference), clip.clip
                if key not in reconstructed:
                    reconstructed[key] = reconstruct_clip(self.sampler, reference, self.layout, clip.clip)
                reference = reconstructed[key]
            references.append(reference)
        return references


def clip_id(sample_id: str, clip: int) -> str:
    """Return the id under which a clip of a sample is scored. The first clip has the id of the sample."""
    return sample_id if clip == 0 else f"{sample_id}/clip_{clip + 1}"


def merge_scores(first: Scores, second: Scores) -> Scores:
    """Merge two dicts {sample: {reward name: score}}. Both may contain rewards of the same sample."""
    return {sample: {**first.get(sample, {}), **second.get(sample, {})} for sample in {**first, **second}}
