"""Embeddings of images and texts by a CLIP model from transformers, and the base class of rewards that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import HubFiles, MediaBatch, Reward, Score
from wfm_reward.rewards._weights import load_pretrained, to_pil_images, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class ClipModel:
    def __init__(self, reward: str, model: str, processor: str, device: str, dtype: str) -> None:
        """Load the model and processor from folders or Hub names. Raises RewardError if they cannot be loaded.

        reward: name of the reward, for error messages.
        """
        from transformers import CLIPModel, CLIPProcessor

        weight_dtype = torch_dtype(reward, dtype)
        self.model: Any = load_pretrained(
            reward, "the model", model, lambda path: CLIPModel.from_pretrained(path, dtype=weight_dtype)
        )
        self.processor: Any = load_pretrained(reward, "the processor", processor, CLIPProcessor.from_pretrained)
        self._prepare_model(device)

    def _prepare_model(self, device: str) -> None:
        self.model.to(device).eval().requires_grad_(False)

    @property
    def logit_scale(self) -> float:
        return float(self.model.logit_scale.float().exp())

    def embed_images(self, media: npt.NDArray[np.uint8] | Sequence[Any]) -> Tensor:
        """Return one unit vector per image, float32 [B, embedding size]. media: uint8 [B,H,W,3] or PIL images."""
        import torch

        images = to_pil_images(media) if isinstance(media, np.ndarray) else list(media)
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            pooled = self.model.vision_model(pixel_values=pixels.to(self.model.device, self.model.dtype)).pooler_output
            return _normalize_rows(self.model.visual_projection(pooled))

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return one unit vector per text, float32 [texts, embedding size]. Long texts are truncated to the context."""
        import torch

        max_length = self.model.config.text_config.max_position_embeddings
        tokens = self.processor(
            text=list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        )
        tokens = {key: tokens[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            pooled = self.model.text_model(**tokens).pooler_output
            return _normalize_rows(self.model.text_projection(pooled))

    def image_text_cosines(self, media: npt.NDArray[np.uint8] | Sequence[Any], texts: Sequence[str]) -> list[float]:
        values: list[float] = (self.embed_images(media) * self.embed_texts(texts)).sum(dim=-1).tolist()
        return values


def _normalize_rows(embeddings: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.normalize(embeddings.float(), dim=-1)


class ClipReward(Reward):
    """Base class of rewards from CLIP embeddings: by default, the cosine similarity of image and prompt."""

    backbone = "CLIP"
    media_types = frozenset({"image"})
    hub_files: ClassVar[Mapping[str, HubFiles]] = {"model": "model"}

    def __init__(self, device: str = "cpu", *, model: str, dtype: str = "float32", **options: Any) -> None:
        super().__init__(device, **options)
        self.model, self.dtype = model, dtype

    def load(self) -> None:
        self._clip = ClipModel(self.name, self.model, self.model, self.device, self.dtype)

    def score(self, batch: MediaBatch) -> list[Score]:
        cosines = self._clip.image_text_cosines(batch.media, batch.prompts)
        return [item.score(cosine) for item, cosine in zip(batch, cosines, strict=True)]
