"""VideoAlign's VideoReward (arXiv 2501.13918): visual quality, motion quality and text alignment of a video.

Install the authors' code (github.com/KwaiVGI/VideoAlign, also in FastVideo) in a separate environment and set the key
`python` in the service configuration.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from wfm_reward.base import UNBOUNDED, MediaBatch, MediaItem, Reward, RewardError, Score
from wfm_reward.rewards._vlm import encode_mp4
from wfm_reward.rewards._weights import load_pretrained, torch_dtype

OUTPUTS = {"overall_reward": "Overall", "vq_reward": "VQ", "mq_reward": "MQ", "ta_reward": "TA"}


class VideoAlign(Reward):
    """VideoReward: visual quality + motion quality + text alignment, without limits.

    Each of the three scores is standardized on the authors' videos. The output `overall_reward` is the sum.
    """

    name = primary_output = "video_align"
    backbone = "Qwen2-VL"
    media_types = frozenset({"video"})
    outputs: ClassVar = {"video_align": UNBOUNDED, **dict.fromkeys(OUTPUTS, UNBOUNDED)}
    download_note = "download the checkpoint of VideoReward to the folder in the option model (docs/rewards.md)"

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
        """model: folder of the checkpoint. code: folder with the code of VideoAlign. None selects the copy in
        FastVideo. output: the output to use as score, overall_reward or a sum such as vq_reward+mq_reward.

        Raises RewardError if `output` is unknown.
        """
        super().__init__(device, **options)
        self.score_outputs = [part.strip() for part in output.split("+")]
        if not set(self.score_outputs) <= OUTPUTS.keys():
            raise RewardError(f"reward {self.name}: output is {output!r}; it must be a sum of {', '.join(OUTPUTS)}")
        self.model, self.code, self.dtype = model, code, dtype

    def load(self) -> None:
        dtype = torch_dtype(self.name, self.dtype)

        def load_model(address: str) -> Any:
            if self.code is None:
                from fastvideo.models.videoalign.inference import VideoVLMRewardInference
            else:  # its modules import each other as top-level modules
                sys.path.insert(0, str(Path(self.code).expanduser()))
                from inference import VideoVLMRewardInference
            return VideoVLMRewardInference(address, device=self.device, dtype=dtype)

        self._model = load_pretrained(self.name, "the model", self.model, load_model)

    def score(self, batch: MediaBatch) -> list[Score]:
        import torch

        if batch.fps is None:
            raise RewardError(f"{self.name} needs the frames per second of the videos; clients must send them")
        with tempfile.TemporaryDirectory(prefix="wfm-videos-") as folder:
            paths = [Path(folder) / f"{i}.mp4" for i in range(len(batch))]
            for path, item in zip(paths, batch, strict=True):
                path.write_bytes(encode_mp4(item.frames, batch.fps))
            with torch.inference_mode():
                ratings = self._model.reward([str(path) for path in paths], list(batch.prompts), use_norm=True)
        return [self._score_item(item, rating) for item, rating in zip(batch, ratings, strict=True)]

    def _score_item(self, item: MediaItem, rating: dict[str, float]) -> Score:
        if not isinstance(rating, dict) or not set(OUTPUTS.values()) <= rating.keys():
            raise RewardError(f"VideoAlign returned {str(rating)[:100]}, not {', '.join(OUTPUTS.values())}")
        parts = {output: float(rating[key]) for output, key in OUTPUTS.items()}
        return item.score(sum(parts[output] for output in self.score_outputs), **parts)


class DanceGrpo(VideoAlign):
    """VideoReward under the name `dance_grpo`, which Cosmos-RL uses. It has the same four outputs."""

    name = "dance_grpo"
    outputs: ClassVar = dict.fromkeys(OUTPUTS, UNBOUNDED)
    primary_output = "overall_reward"

    def _score_item(self, item: MediaItem, rating: dict[str, float]) -> Score:
        score = super()._score_item(item, rating)
        parts = {name: part for name, part in score.parts.items() if name != self.primary_output}
        return score if score.value is None else item.score(score.value, **parts)
