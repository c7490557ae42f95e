"""LAION's aesthetic predictor: a head on CLIP ViT-L/14 (github.com/christophschuhmann/improved-aesthetic-predictor)."""

from __future__ import annotations

from typing import Any, ClassVar

from wfm_reward.base import UNBOUNDED, MediaBatch, RewardError, Score
from wfm_reward.rewards._clip import ClipReward
from wfm_reward.rewards._weights import load_pretrained, load_torch_file

LINEAR_LAYERS = (0, 2, 4, 6, 7)  # indices of the linear layers in the published nn.Sequential; the rest is dropout


class Aesthetic(ClipReward):
    """Predicted aesthetic rating, on a scale of about 1 to 10 and usually 4 to 7. The prompt has no effect."""

    name = primary_output = "aesthetic"
    outputs: ClassVar = {"aesthetic": UNBOUNDED}
    hub_files: ClassVar = {"model": "model", "head": "file"}

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "openai/clip-vit-large-patch14",
        head: str = "trl-lib/ddpo-aesthetic-predictor:aesthetic-model.pth",
        **options: Any,
    ) -> None:
        """head: path of sac+logos+ava1-l14-linearMSE.pth, or OWNER/REPOSITORY:FILE on the Hub."""
        super().__init__(device, model=model, **options)
        self.head = head

    def load(self) -> None:
        from torch import nn

        super().load()
        weights = load_pretrained(self.name, "the head", self.head, load_torch_file)
        size = self._clip.model.config.projection_dim
        try:
            layers = [
                (weights[f"layers.{i}.weight"].float(), weights[f"layers.{i}.bias"].float()) for i in LINEAR_LAYERS
            ]
            head = nn.Sequential(*(nn.Linear(weight.shape[1], weight.shape[0]) for weight, _ in layers))
            for linear, (weight, bias) in zip(head, layers, strict=True):
                linear.load_state_dict({"weight": weight, "bias": bias})
        except (KeyError, RuntimeError) as error:
            raise RewardError(f"reward aesthetic: {self.head} is not the published head: {error}") from error
        if layers[0][0].shape[1] != size or layers[-1][0].shape[0] != 1:
            raise RewardError(f"reward aesthetic: {self.head} is not a head for embeddings of size {size}")
        self._head = head.to(self.device).eval()

    def score(self, batch: MediaBatch) -> list[Score]:
        import torch

        with torch.inference_mode():
            values = self._head(self._clip.embed_images(batch.media))[:, 0].tolist()
        return [item.score(value) for item, value in zip(batch, values, strict=True)]
