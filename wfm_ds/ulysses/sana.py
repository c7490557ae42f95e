"""Sequence parallelism for SANA: rows of patches are sharded.

The output of `patch_embed` in diffusers' SanaTransformer2DModel is sharded. Text attention (`attn2`) needs no exchange.
"""

from __future__ import annotations

from typing import Any

from diffusers import SanaTransformer2DModel
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from wfm_ds.ulysses.attention import project_output
from wfm_ds.ulysses.base import EPS, UlyssesLineTransformer, patch_grid
from wfm_ds.ulysses.exchange import shard_sizes, sum_over_ranks


class SanaLinearAttention:
    """Replacement for SanaLinearAttnProcessor2_0.

    For queries q, keys k and values v (row vectors), the result is (relu(q) @ S) / (relu(q) @ z). S is the sum of
    relu(k)^T @ v, and z is the sum of relu(k)^T. Both are float32 sums over the tokens of all ranks.
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
        """Compute the attention of the local tokens [batch, local tokens, channels] to all tokens."""
        query, key, value = (layer(hidden_states) for layer in (attn.to_q, attn.to_k, attn.to_v))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        query, key, value = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for x in (query, key, value))
        padded_value = functional.pad(value, (0, 1), value=1.0)  # [B,H,n,D+1]: the last column sums to z
        state = sum_over_ranks(functional.relu(key).transpose(2, 3) @ padded_value, self.group)  # [B,H,D,D+1]
        numerator, denominator = (functional.relu(query) @ state).split_with_sizes([value.shape[-1], 1], -1)
        attended = (numerator / (denominator + EPS)).transpose(1, 2).flatten(2)
        return project_output(attn, attended.to(hidden_states.dtype))


class UlyssesSana(UlyssesLineTransformer):
    transformer_class = SanaTransformer2DModel
    patch_embedding = "patch_embed"
    shard_unit = "rows of patches"
    original_processor = SanaLinearAttnProcessor2_0
    sharded_processor = SanaLinearAttention
    convolution_name = "conv_depth"

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        height, width = patch_grid(arguments["hidden_states"].shape[2:], [self.config.patch_size] * 2)
        return [rows * width for rows in self.row_shard_sizes(height)]

    def shard_block_arguments(self, arguments: dict[str, Any]) -> None:
        arguments["height"] = self.row_shard_sizes(arguments["height"])[self.rank]

    def row_shard_sizes(self, height: int) -> list[int]:
        return shard_sizes(height, self.num_ranks, self.shard_unit)
