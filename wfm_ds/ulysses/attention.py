"""Softmax attention over sharded tokens, and the rotary embedding applied before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.exchange import local_shard, reshard, shard_sizes

# Which of the D channels rotate together. neighbours: 2 i and 2 i + 1. halves: i and i + D / 2.
RotationPairs = Literal["neighbours", "halves"]


def sequence_attention(
    query_BnHD: Tensor,
    key_BnHD: Tensor,
    value_BnHD: Tensor,
    lengths: Sequence[int] | None,
    group: ProcessGroup | None,
    backend: Any,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the attention output of the local tokens, which attend to all tokens. All ranks of `group` must call this.

    query, key, value and the output: [batch, local tokens, heads, channels per head]. The caller must already have
    applied norms and the rotary embedding. lengths: number of tokens on each rank.
    backend: diffusers' name of the attention kernel. None selects the active kernel.
    `lengths` and `group` are None if all tokens are local. Only then, a mask is allowed.
    """
    if (lengths is None) != (group is None):
        raise ValueError("sequence_attention needs both `lengths` and `group`, or neither if all tokens are local")
    if lengths is None or group is None:
        output: Tensor = dispatch_attention_fn(query_BnHD, key_BnHD, value_BnHD, mask, backend=backend)
        return output
    assert mask is None, "a mask needs all tokens"
    heads = shard_sizes(query_BnHD.shape[2], dist.get_world_size(group), "attention heads")
    query, key, value = reshard((query_BnHD, key_BnHD, value_BnHD), 2, heads, 1, lengths, group)  # [B,S,h,D]
    attended = dispatch_attention_fn(query, key, value, backend=backend)
    return reshard((attended,), 1, lengths, 2, heads, group)[0]


def shard_tables(tables: Sequence[Tensor], dim: int, group: ProcessGroup) -> tuple[list[int], list[Tensor]]:
    """Return the number of tokens on each rank, and the local tokens of rotary tables. dim: axis of the tokens."""
    lengths = shard_sizes(tables[0].shape[dim], dist.get_world_size(group), "tokens")
    return lengths, [local_shard(table, dim, lengths, group) for table in tables]


def apply_rotation(x_BnHD: Tensor, tables_nD: Sequence[Tensor], pairs: RotationPairs) -> Tensor:
    """Apply the rotary embedding to queries or keys [batch, tokens, heads, channels per head].

    tables: cosines and sines, [tokens, channels per head] each.
    """
    cos, sin = tables_nD
    unbind_dim = {"neighbours": -1, "halves": -2}[pairs]
    result: Tensor = apply_rotary_emb(x_BnHD, (cos, sin), use_real=True, use_real_unbind_dim=unbind_dim, sequence_dim=1)
    return result


def project_output(attn: Any, attended_BnC: Tensor) -> Tensor:
    projection, dropout = attn.to_out
    result: Tensor = dropout(projection(attended_BnC))
    return result
