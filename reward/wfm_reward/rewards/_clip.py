"""CLIP models of transformers: normalised embeddings of pictures and texts, for the rewards that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wfm_reward.rewards._weights import loaded, pictures, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


class Clip:
    """One model on one device."""

    def __init__(self, reward: str, model: str, processor: str, device: str, dtype: str) -> None:
        """`model` and `processor`: folders, or names on the hub. Raises RewardError if they cannot be loaded."""
        from transformers import CLIPModel, CLIPProcessor

        kind = torch_dtype(reward, dtype)
        self.model: Any = loaded(reward, "the model", model, lambda at: CLIPModel.from_pretrained(at, dtype=kind))
        self.processor: Any = loaded(reward, "the processor", processor, CLIPProcessor.from_pretrained)
        self._place(device)

    def _place(self, device: str) -> None:
        self.model.to(device).eval().requires_grad_(False)

    @property
    def logit_scale(self) -> float:
        return float(self.model.logit_scale.float().exp())

    def images(self, media: npt.NDArray[np.uint8] | Sequence[Any]) -> Tensor:
        """float32 [B,D] of length 1, of uint8 [B,H,W,3] or PIL images, resized and cropped as the model wants them."""
        import torch

        shown = pictures(media) if isinstance(media, np.ndarray) else list(media)
        pixels = self.processor(images=shown, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            pooled = self.model.vision_model(pixel_values=pixels.to(self.model.device, self.model.dtype)).pooler_output
            return _unit(self.model.visual_projection(pooled))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """float32 [B,D] of length 1; a text is cut where the model's context ends."""
        import torch

        most = self.model.config.text_config.max_position_embeddings
        tokens = self.processor(text=list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt")
        tokens = {key: tokens[key].to(self.model.device) for key in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            pooled = self.model.text_model(**tokens).pooler_output
            return _unit(self.model.text_projection(pooled))

    def cosines(self, media: npt.NDArray[np.uint8] | Sequence[Any], texts: Sequence[str]) -> list[float]:
        """Return the cosine of each picture and its own text."""
        values: list[float] = (self.images(media) * self.texts(texts)).sum(dim=-1).tolist()
        return values


def _unit(embeddings: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.normalize(embeddings.float(), dim=-1)
