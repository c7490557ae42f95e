"""Score videos with image rewards: score selected frames as images, and average the scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from wfm_ds.errors import RewardError
from wfm_ds.types import MediaBatch, Score

FRAME_RULE_FORMS = "first, middle, last or uniform:N"


@dataclass(frozen=True, slots=True)
class FrameRule:
    """Selects the frames of a video to score. Raises RewardError if `text` is invalid.

    text: `first`, `middle`, `last`, or `uniform:N`, which selects the middle frame of each of N equal segments.
    """

    text: str = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not re.fullmatch(r"first|middle|last|uniform:[1-9][0-9]{0,3}", self.text):
            raise RewardError(f"frames is {self.text!r}; it must be {FRAME_RULE_FORMS}")

    def frame_indices(self, num_frames: int) -> list[int]:
        """Return the ascending indices of the selected frames, without duplicates."""
        match self.text:
            case "first":
                return [0]
            case "middle":
                return [num_frames // 2]
            case "last":
                return [num_frames - 1]
        parts = min(int(self.text.removeprefix("uniform:")), num_frames)
        return [(2 * part + 1) * num_frames // (2 * parts) for part in range(parts)]


def score_frames(
    score_images: Callable[[MediaBatch], Sequence[Score]], videos: MediaBatch, rule: FrameRule, max_batch: int
) -> list[Score]:
    """Return one Score per video: the mean over its selected frames. If a frame fails, its video fails.

    The mean of a part in `Score.parts` is computed if all frames have the part. score_images: function that returns one
    Score per image for at most `max_batch` images [B,H,W,3]. An image has its video's sample id, prompt, metadata and
    inputs.
    """
    frame_indices = rule.frame_indices(videos.media.shape[1])
    rows = [(video, frame) for video in range(len(videos)) for frame in frame_indices]
    scores: list[Score] = []
    for start in range(0, len(rows), max_batch):
        part = rows[start : start + max_batch]
        images = MediaBatch(
            media=np.stack([videos.media[video, frame] for video, frame in part]),
            sample_ids=[videos.sample_ids[video] for video, _ in part],
            prompts=[videos.prompts[video] for video, _ in part],
            metadata=[videos.metadata[video] for video, _ in part],
            inputs=[videos.inputs[video] for video, _ in part] if videos.inputs else (),
            images=[videos.images[video] for video, _ in part] if videos.images else (),
            reward=videos.reward,
        )
        scores += score_images(images)
    count, labels = len(frame_indices), [f"frame {index}" for index in frame_indices]
    by_video = [scores[start : start + count] for start in range(0, len(scores), count)]
    return [mean_score(part, labels, common_parts(part)) for part in by_video]


def common_parts(scores: Sequence[Score]) -> list[str]:
    return [name for name in scores[0].parts if all(name in score.parts for score in scores)]


def mean_score(scores: Sequence[Score], labels: Sequence[str], parts: Iterable[str]) -> Score:
    """Return the mean of several scores of one sample, or a failure that names the first failed score.

    labels: names of the scores. parts: names in Score.parts, each averaged over the scores that have it.
    """
    first, seconds = scores[0], sum(score.seconds for score in scores)
    for label, score in zip(labels, scores, strict=True):
        if score.failure is not None:
            reason = f"{label}: {score.failure}"
            return Score(sample_id=first.sample_id, reward=first.reward, failure=reason, seconds=seconds)
    return Score(
        sample_id=first.sample_id,
        reward=first.reward,
        value=float(np.mean([score.value for score in scores if score.value is not None])),
        seconds=seconds,
        parts={name: float(np.mean([s.parts[name] for s in scores if name in s.parts])) for name in parts},
    )
