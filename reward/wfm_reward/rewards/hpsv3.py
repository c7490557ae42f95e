"""HPS v3 (arXiv 2508.03789): human preference score from a Qwen2-VL-7B, from the package hpsv3."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import UNBOUNDED, MediaBatch, Reward, RewardError, Score
from wfm_reward.rewards._weights import load_pretrained, to_pil_images


class HpsV3(Reward):
    """HPS v3: mean of the predicted preference distribution. The value is not normalized and has no limits.

    The values in Cosmos-RL's example are 7 to 11, so the key `clip` must allow such values. The reward also reports
    `sigma`, the predicted standard deviation. Install the package hpsv3 (github.com/MizzenAI/HPSv3) in a separate
    environment and set the key `python` in the service configuration.
    """

    name = primary_output = "hpsv3"
    backbone = "Qwen2-VL"
    media_types = frozenset({"image"})
    outputs: ClassVar = {"hpsv3": UNBOUNDED, "sigma": UNBOUNDED}
    download_note = "the package hpsv3 downloads its weights when the reward starts"

    def __init__(
        self, device: str = "cpu", *, checkpoint: str | None = None, config: str | None = None, **options: Any
    ) -> None:
        """checkpoint: path of HPSv3.safetensors. None: the package downloads it. config: YAML file of the package."""
        super().__init__(device, **options)
        self.checkpoint, self.config = checkpoint, config

    def load(self) -> None:
        def load_model(_: str) -> Any:
            from hpsv3 import HPSv3RewardInferencer

            paths = {"checkpoint_path": self.checkpoint, "config_path": self.config}
            return HPSv3RewardInferencer(device=self.device, **{k: v for k, v in paths.items() if v is not None})

        self._model = load_pretrained(self.name, "the model", self.checkpoint or "MizzenAI/HPSv3", load_model)

    def score(self, batch: MediaBatch) -> list[Score]:
        # Keyword arguments, because releases of the package differ in the order.
        rows = self._model.reward(prompts=list(batch.prompts), image_paths=to_pil_images(batch.media)).float().tolist()
        if len(rows) != len(batch) or not all(len(row) == 2 for row in rows):
            raise RewardError(f"hpsv3 returned {str(rows)[:80]} for {len(batch)} images, not two numbers per image")
        return [item.score(mean, sigma=sigma) for item, (mean, sigma) in zip(batch, rows, strict=True)]
