"""HPS v2.1 (arXiv 2306.09341): human preference score from a fine-tuned CLIP-H."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, Range, Score
from wfm_reward.rewards._clip import ClipModel, ClipReward
from wfm_reward.rewards._weights import load_pretrained, load_torch_file, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

# open_clip's names of layers -> those of transformers
WEIGHT_NAMES = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
}
NORM_NAMES = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
PROJECTION_NAMES = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
BLOCK_LAYER_NAMES = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
BLOCK_PATTERN = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
IGNORED_WEIGHTS = ("attn_mask",)


class HpsV2(ClipReward):
    """HPS v2.1: cosine similarity of image and prompt, -1 to 1, usually 0.2 to 0.35."""

    name = primary_output = "hpsv2"
    outputs: ClassVar = {"hpsv2": Range(-1.001, 1.001)}  # rounding can exceed 1
    hub_files: ClassVar = {"model": "file", "base": "processor"}

    def __init__(
        self,
        device: str = "cpu",
        *,
        model: str = "xswu/HPSv2:HPS_v2.1_compressed.pt",
        base: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        **options: Any,
    ) -> None:
        """model: the published weights, as a local file or OWNER/REPOSITORY:FILE on the Hub. base: folder or Hub name
        of the base CLIP model, for its configuration and processor.
        """
        super().__init__(device, model=model, **options)
        self.base = base

    def load(self) -> None:
        self._clip = _OpenClipModel(self.name, self.model, self.base, self.device, self.dtype)
        self._size = self._clip.model.config.vision_config.image_size

    def score(self, batch: MediaBatch) -> list[Score]:
        cosines = self._clip.image_text_cosines(letterbox_images(batch.media, self._size), batch.prompts)
        return [item.score(cosine) for item, cosine in zip(batch, cosines, strict=True)]


class _OpenClipModel(ClipModel):
    def __init__(self, reward: str, weights: str, base: str, device: str, dtype: str) -> None:
        from transformers import CLIPConfig, CLIPModel, CLIPProcessor

        def load_weights(address: str) -> dict[str, Any]:
            saved = load_torch_file(address)
            return convert_to_transformers(saved.get("state_dict", saved))

        config = load_pretrained(reward, "the configuration of", base, CLIPConfig.from_pretrained)
        self.processor = load_pretrained(reward, "the processor of", base, CLIPProcessor.from_pretrained)
        state = load_pretrained(reward, "the model", weights, load_weights)
        self.model = CLIPModel(config)
        load_pretrained(reward, "the model", weights, lambda _: self.model.load_state_dict(state))
        self.model.to(torch_dtype(reward, dtype))
        self._prepare_model(device)


def letterbox_images(media: npt.NDArray[np.uint8], size: int) -> Sequence[Any]:
    """Resize images to fit into `size` x `size` and pad them with black. Returns PIL images."""
    from PIL import Image

    _, height, width, _ = media.shape
    scale = size / max(height, width)
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    images = []
    for image in media:
        resized = Image.fromarray(image).resize(small, Image.Resampling.BICUBIC)
        frame = Image.new("RGB", (size, size))
        frame.paste(resized, ((size - small[0]) // 2, (size - small[1]) // 2))
        images.append(frame)
    return images


def convert_to_transformers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Convert open_clip's weights for transformers' CLIPModel. Raises KeyError for unknown weights."""
    return {name: tensor for key, weight in weights.items() for name, tensor in _convert_weight(key, weight)}


def _convert_weight(key: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in IGNORED_WEIGHTS:
        return
    if key in WEIGHT_NAMES:
        yield WEIGHT_NAMES[key], weight
    elif key in PROJECTION_NAMES:
        yield PROJECTION_NAMES[key], weight.T.contiguous()
    elif key.rpartition(".")[0] in NORM_NAMES:
        layer, _, part = key.rpartition(".")
        yield f"{NORM_NAMES[layer]}.{part}", weight
    elif match := BLOCK_PATTERN.fullmatch(key):
        tower = "vision_model" if match[1] else "text_model"
        yield from _convert_block_weight(f"{tower}.encoder.layers.{match[2]}", match[3], weight)
    else:
        raise KeyError(f"{key} is not a weight of open_clip's CLIP")


def _convert_block_weight(prefix: str, key: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in ("attn.in_proj_weight", "attn.in_proj_bias"):
        part = key.rpartition("_")[2]
        for name, third in zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3), strict=True):
            yield f"{prefix}.self_attn.{name}.{part}", third.contiguous()
        return
    layer, _, part = key.rpartition(".")
    yield f"{prefix}.{BLOCK_LAYER_NAMES[layer]}.{part}", weight
