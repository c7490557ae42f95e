"""Attention of a row's conversations, each within itself: torch's own, one after the other and without a mask.

A mask of a row takes the square of its tokens, in memory and in work, and torch's fused kernels for causal attention
do not take one. FlashAttention 2, where it is installed, needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "wfm_ds_rows"  # among transformers' own; a name that it does not know gets no mask


def has_windows(network: Any) -> bool:
    """Return whether layers of the decoder attend to a sliding window, which segments do not tell."""
    config = network.config.get_text_config()
    return "sliding_attention" in (getattr(config, "layer_types", None) or [])


def install(network: nn.Module) -> bool:
    """Change a model in place, if its decoder has torch's own attention without windows: each forward then needs
    `segments`, the tokens of each conversation of its row. Return whether it does."""
    bare: Any = network
    decoder = bare.model.language_model
    if decoder.config._attn_implementation != "sdpa" or has_windows(network):
        return False
    register()
    decoder.config._attn_implementation = NAME
    return True


def register() -> None:
    """Have transformers know this attention by its name."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query_BHLD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    attention_mask: None,
    *,
    segments: Sequence[int],
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: heads in and [B,L,H,D] out."""
    attended = within(query_BHLD, key_BKLD, value_BKLD, segments, scaling=scaling, dropout=dropout)
    return attended.transpose(1, 2).contiguous(), None


def within(
    query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, segments: Sequence[int], *, scaling: float, dropout: float
) -> Tensor:
    """Causal attention [B,H,L,D] within each segment. H query heads share K heads of keys and values."""
    grouped = query_BHLD.shape[1] != key_BKLD.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(
            *(torch.split(x, list(segments), 2) for x in (query_BHLD, key_BKLD, value_BKLD)), strict=True
        )
    ]
    return torch.cat(parts, dim=2)
