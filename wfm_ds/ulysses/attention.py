"""Softmax attention over tokens that the ranks of a group share, and the rotation by position before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.exchange import reshard, shares

Pairs = Literal["neighbours", "halves"]  # which two channels rotate together: 2 i and 2 i + 1, or i and i + D / 2


def attend(
    query_BnHD: Tensor,
    key_BnHD: Tensor,
    value_BnHD: Tensor,
    lengths: Sequence[int],
    group: ProcessGroup,
    backend: Any,
) -> Tensor:
    """Attention of every token to every token, [B,n,H,D]. Two exchanges: queries, keys and values in one, then back.

    n: this rank's tokens, lengths[rank] of `lengths`. Between the exchanges a rank has all tokens for its share of the
    heads, so any attention kernel without a mask serves; rotations and norms are already applied. backend: one of
    diffusers' names, else its active one.
    """
    heads = shares(query_BnHD.shape[2], dist.get_world_size(group), "attention heads")
    query, key, value = reshard((query_BnHD, key_BnHD, value_BnHD), 2, heads, 1, lengths, group)  # [B,S,h,D]
    attended = dispatch_attention_fn(query, key, value, backend=backend)
    return reshard((attended,), 1, lengths, 2, heads, group)[0]


def rotated(x_BnHD: Tensor, tables_nD: Sequence[Tensor], pairs: Pairs) -> Tensor:
    """Queries or keys turned by their position, in their dtype, computed in float32. tables: cosines, sines."""
    cos, sin = tables_nD
    unbind_dim = {"neighbours": -1, "halves": -2}[pairs]
    turned: Tensor = apply_rotary_emb(x_BnHD, (cos, sin), use_real=True, use_real_unbind_dim=unbind_dim, sequence_dim=1)
    return turned


def projected_out(attn: Any, attended_BnC: Tensor) -> Tensor:
    """The last layers of a diffusers attention."""
    projection, dropout = attn.to_out
    made: Tensor = dropout(projection(attended_BnC))
    return made
