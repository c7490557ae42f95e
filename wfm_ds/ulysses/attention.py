"""Softmax attention over tokens that the ranks of a group share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.exchange import reshard, shares


def attend(
    query_BnHD: Tensor,
    key_BnHD: Tensor,
    value_BnHD: Tensor,
    lengths: Sequence[int],
    group: ProcessGroup,
    backend: Any = None,
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
