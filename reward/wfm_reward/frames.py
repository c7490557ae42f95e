"""Score videos with image rewards: score selected frames as images, and average the scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    count = len(frame_indices)
    return [mean_score(scores[start : start + count], frame_indices) for start in range(0, len(scores), count)]


def mean_score(scores: Sequence[Score], frames: Sequence[int]) -> Score:
    """Return the mean of the frame scores of one video, or a failure that names the first failed frame.

    frames: index of each scored frame in the video.
    """
    first, values = scores[0], list[float]()
    for score, frame in zip(scores, frames, strict=True):
        if score.value is None:
            reason = f"frame {frame}: {score.failure}"
            return Score(sample_id=first.sample_id, reward=first.reward, failure=reason, seconds=_total_seconds(scores))
        values.append(score.value)
    common = [name for name in first.parts if all(name in score.parts for score in scores)]
    return Score(
        sample_id=first.sample_id,
        reward=first.reward,
        value=float(np.mean(values)),
        seconds=_total_seconds(scores),
        parts={name: float(np.mean([score.parts[name] for score in scores])) for name in common},
    )


def _total_seconds(scores: Sequence[Score]) -> float:
    return sum(score.seconds for score in scores)
