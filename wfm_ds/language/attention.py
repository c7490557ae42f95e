"""Attention within each conversation of a packed sequence: one SDPA call per conversation, without a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "wfm_ds_rows"  # in transformers' attention registry; transformers builds masks only for its own names


def has_windows(network: Any) -> bool:
    config = network.config.get_text_config()
    return "sliding_attention" in (getattr(config, "layer_types", None) or [])


def install_segment_attention(network: nn.Module) -> bool:
    """Replace SDPA in the decoder, in place, by attention within each conversation. Return whether it was replaced.

    Forward calls then need the argument `segments`: the number of tokens of each conversation. Decoders that do not use
    SDPA, or that have sliding windows, are not changed.
    """
    unwrapped: Any = network
    decoder = unwrapped.model.language_model
    if decoder.config._attn_implementation != "sdpa" or has_windows(network):
        return False
    register_attention()
    decoder.config._attn_implementation = ATTENTION_NAME
    return True


def register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, segment_attention_forward)


def segment_attention_forward(
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
    """Compute `segment_attention` with the interface of transformers. Return [B,L,H,D]."""
    output = segment_attention(query_BHLD, key_BKLD, value_BKLD, segments, scaling=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def segment_attention(
    query_BHLD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, segments: Sequence[int], *, scaling: float, dropout: float
) -> Tensor:
    """Compute causal attention within each segment. Return [B,H,L,D].

    There are B sequences, L tokens and D channels per head. The H query heads share K key and value heads. segments:
    number of tokens of each segment.
    """
    is_grouped = query_BHLD.shape[1] != key_BKLD.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped)
        for q, k, v in zip(
            *(torch.split(x, list(segments), 2) for x in (query_BHLD, key_BKLD, value_BKLD)), strict=True
        )
    ]
    return torch.cat(parts, dim=2)
