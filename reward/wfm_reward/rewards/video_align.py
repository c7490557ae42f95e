"""VideoAlign's VideoReward (arXiv 2501.13918): visual quality, motion quality and text alignment of a video.

By the authors' own code (github.com/KwaiVGI/VideoAlign, also in FastVideo), which has requirements of its own: give it
a Python of its own, by the key `python` of a service's configuration.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, RewardError, Score
from wfm_reward.rewards._judge import mp4
from wfm_reward.rewards._weights import loaded, torch_dtype

OUTPUTS = {"overall_reward": "Overall", "vq_reward": "VQ", "mq_reward": "MQ", "ta_reward": "TA"}
UNBOUNDED = Range(-math.inf, math.inf)


class VideoAlign(Reward):
    """Standardised by the model's own configuration, so that each of VQ, MQ and TA has mean 0 and deviation 1 over its
    authors' videos, and is unbounded; overall_reward is their sum.

    The model reads video files: a clip reaches it as H.264 with hardly any loss.
    """

    name = "video_align"
    backbone = "Qwen2-VL"
    media = frozenset({"video"})
    outputs: ClassVar = {"video_align": UNBOUNDED, **dict.fromkeys(OUTPUTS, UNBOUNDED)}
    primary = "video_align"

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "KwaiVGI/VideoReward",
        code: str | None = None,
        output: str = "overall_reward",
        dtype: str = "bfloat16",
        **options: Any,
    ) -> None:
        """`model`: folder of the checkpoint. `code`: a checkout of VideoAlign; unset: the one within FastVideo.
        `output`: what is the score, overall_reward or a sum such as vq_reward+mq_reward. Raises RewardError for others.
        """
        super().__init__(device, **options)
        self.wanted = [part.strip() for part in output.split("+")]
        if not set(self.wanted) <= OUTPUTS.keys():
            raise RewardError(f"reward {self.name}: output is {output!r}; it must be a sum of {', '.join(OUTPUTS)}")
        self.model, self.code, self.dtype = model, code, dtype

    def load(self) -> None:
        dtype = torch_dtype(self.name, self.dtype)

        def load_model(address: str) -> Any:
            return self._inference()(address, device=self.device, dtype=dtype)

        self._model = loaded(self.name, "the model", self.model, load_model)

    def _inference(self) -> Any:
        """The class VideoVLMRewardInference."""
        if self.code is None:
            from fastvideo.models.videoalign.inference import VideoVLMRewardInference
        else:
            sys.path.insert(0, str(Path(self.code).expanduser()))  # its modules import each other by bare names
            from inference import VideoVLMRewardInference
        return VideoVLMRewardInference

    def score(self, batch: MediaBatch) -> list[Score]:
        """Raises RewardError if the videos have no speed, or the model does not return its four numbers."""
        if batch.fps is None:
            raise RewardError(f"{self.name} needs the videos' frames per second: the clients must say them")
        with tempfile.TemporaryDirectory(prefix="wfm-videos-") as folder:
            paths = [Path(folder) / f"{i}.mp4" for i in range(len(batch))]
            for path, item in zip(paths, batch, strict=True):
                path.write_bytes(mp4(item.frames, batch.fps))
            answers = self._rated([str(path) for path in paths], list(batch.prompts))
        return [self._score(item, answer) for item, answer in zip(batch, answers, strict=True)]

    def _rated(self, paths: Sequence[str], prompts: Sequence[str]) -> Sequence[dict[str, float]]:
        import torch

        with torch.inference_mode():
            answers: Sequence[dict[str, float]] = self._model.reward(paths, prompts, use_norm=True)
        return answers

    def _score(self, item: MediaItem, answer: dict[str, float]) -> Score:
        if not isinstance(answer, dict) or not set(OUTPUTS.values()) <= answer.keys():
            raise RewardError(f"VideoAlign returned {str(answer)[:100]}, not {', '.join(OUTPUTS.values())}")
        parts = {output: float(answer[theirs]) for output, theirs in OUTPUTS.items()}
        return item.scored(sum(parts[output] for output in self.wanted), **parts)


class DanceGrpo(VideoAlign):
    """`video_align` under the name that Cosmos-RL's reward service and its recipes give it, with its four outputs."""

    name = "dance_grpo"
    outputs: ClassVar = dict.fromkeys(OUTPUTS, UNBOUNDED)
    primary = "overall_reward"

    def _score(self, item: MediaItem, answer: dict[str, float]) -> Score:
        score = super()._score(item, answer)
        parts = {name: part for name, part in score.parts.items() if name != self.primary}
        return score if score.value is None else item.scored(score.value, **parts)
