"""Convert CLIP weights from open_clip to transformers. The two libraries name the layers differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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


def convert_to_transformers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict of open_clip to a state dict of transformers' CLIPModel.

    Raises KeyError for unknown weights.
    """
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
