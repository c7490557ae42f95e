"""Compute normalized embeddings of images and texts with a CLIP model from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
