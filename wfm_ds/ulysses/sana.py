"""SANA: rows of patches are sharded. Linear attention sums a state, the 3x3 convolution exchanges border rows.

In diffusers' SanaTransformer2DModel the output of `patch_embed` is sharded. Text attention (`attn2`) is local.
"""

from __future__ import annotations

from typing import Any

from diffusers import SanaTransformer2DModel
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from wfm_ds.ulysses.attention import projected_out
from wfm_ds.ulysses.base import patches
from wfm_ds.ulysses.exchange import shares, sum_over_ranks
from wfm_ds.ulysses.lines import EPS, SharedLines


class LinearAttention:
    """Replacement of SanaLinearAttnProcessor2_0: relu(q) S / relu(q) z.

    S is the sum of relu(k) v^T over all tokens, z the sum of relu(k), both in float32.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [B,n,C]: the local tokens."""
        query, key, value = (layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for x in (query, key, value))
        padded_value = functional.pad(value, (0, 1), value=1.0)  # [B,H,n,D+1]: the last column sums to z
        state = sum_over_ranks(functional.relu(key).transpose(2, 3) @ padded_value, self.group)  # [B,H,D,D+1]
        numerator, denominator = (functional.relu(query) @ state).split_with_sizes([value.shape[-1], 1], -1)
        attended = (numerator / (denominator + EPS)).transpose(1, 2).flatten(2)
        return projected_out(attn, attended.to(hidden_states.dtype))


class Sana(SharedLines):
    transformer = SanaTransformer2DModel
    patch_embedding = "patch_embed"
    unit = "rows of patches"
    stock_attention = SanaLinearAttnProcessor2_0
    attention = LinearAttention
    convolution = "conv_depth"

    def token_shares(self, arguments: dict[str, Any]) -> list[int]:
        height, width = patches(arguments["hidden_states"].shape[2:], [self.config.patch_size] * 2)
        return [rows * width for rows in self.shares_of_rows(height)]

    def share_lines(self, arguments: dict[str, Any]) -> None:
        arguments["height"] = self.shares_of_rows(arguments["height"])[self.rank]

    def shares_of_rows(self, height: int) -> list[int]:
        return shares(height, self.num_ranks, self.unit)
