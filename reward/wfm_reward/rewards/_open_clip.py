"""Convert CLIP weights from open_clip to transformers, which names the layers differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
}
NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
PROJECTIONS = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
IGNORED = ("attn_mask",)


def to_transformers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an open_clip state dict to one of transformers' CLIPModel. Raises KeyError for unknown weights."""
    return {name: tensor for key, weight in weights.items() for name, tensor in _renamed(key, weight)}


def _renamed(key: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in IGNORED:
        return
    if key in NAMES:
        yield NAMES[key], weight
    elif key in PROJECTIONS:
        yield PROJECTIONS[key], weight.T.contiguous()
    elif key.rpartition(".")[0] in NORMS:
        layer, _, part = key.rpartition(".")
        yield f"{NORMS[layer]}.{part}", weight
    elif match := BLOCK.fullmatch(key):
        tower = "vision_model" if match[1] else "text_model"
        yield from _in_block(f"{tower}.encoder.layers.{match[2]}", match[3], weight)
    else:
        raise KeyError(f"{key} is not a weight of open_clip's CLIP")


def _in_block(prefix: str, key: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in ("attn.in_proj_weight", "attn.in_proj_bias"):
        part = key.rpartition("_")[2]
        for name, third in zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3), strict=True):
            yield f"{prefix}.self_attn.{name}.{part}", third.contiguous()
        return
    layer, _, part = key.rpartition(".")
    yield f"{prefix}.{IN_BLOCK[layer]}.{part}", weight
