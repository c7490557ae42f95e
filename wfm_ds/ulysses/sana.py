"""Sequence parallelism for SANA and SANA-Video: rows of patches or frames are sharded.

In diffusers' SanaTransformer2DModel, the output of `patch_embed` is sharded. In SanaVideoTransformer3DModel, the output
of `patch_embedding` and the rotary tables are sharded, and timesteps if there is one for each token. Linear attention
sums a state over the ranks, and the convolution across lines exchanges lines. Text attention (`attn2`) and the 3x3
convolution of SANA-Video need no exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SanaTransformer2DModel, SanaVideoTransformer3DModel
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaLinearAttnProcessor3_0
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from wfm_ds.ulysses.attention import apply_rotation, project_output
from wfm_ds.ulysses.base import UlyssesLineTransformer, patch_grid
from wfm_ds.ulysses.exchange import local_shard, shard_sizes, sum_over_ranks

EPS = 1e-15  # as in diffusers' processors


def project_inputs(attn: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values [batch, tokens, heads, channels per head], with the norms of the attention."""
    query, key, value = (layer(tokens) for layer in (attn.to_q, attn.to_k, attn.to_v))
    query = query if attn.norm_q is None else attn.norm_q(query)
    key = key if attn.norm_k is None else attn.norm_k(key)
    return tuple(x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))


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
        query, key, value = (x.transpose(1, 2).float() for x in project_inputs(attn, hidden_states))  # [B,H,n,D]
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
        height, width = patch_grid(self.config, arguments["hidden_states"].shape[2:])
        return [rows * width for rows in self.row_shard_sizes(height)]

    def shard_block_arguments(self, arguments: dict[str, Any]) -> None:
        arguments["height"] = self.row_shard_sizes(arguments["height"])[self.rank]

    def row_shard_sizes(self, height: int) -> list[int]:
        return shard_sizes(height, self.num_ranks, self.shard_unit)


class SanaVideoLinearAttention:
    """Replacement for SanaLinearAttnProcessor3_0.

    For queries q, keys k and values v (row vectors), the result is (R(relu(q)) @ S) / (relu(q) @ z), where R applies
    the rotary embedding. S is the sum of R(relu(k))^T @ v, and z is the sum of relu(k)^T. Both are float32 sums over
    the tokens of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Compute the attention of the local tokens [batch, local tokens, channels] to all tokens.

        rotary_emb: rotary tables (cosines, sines) of the local tokens, [1, local tokens, 1, channels per head] each.
        """
        query, key, value = project_inputs(attn, hidden_states)
        query, key = functional.relu(query), functional.relu(key)
        tables = [table[0, :, 0] for table in rotary_emb]
        rotated_query, rotated_key = (
            apply_rotation(query, tables, "neighbours"),
            apply_rotation(key, tables, "neighbours"),
        )
        rotated_query, rotated_key, value = (x.float().transpose(1, 2) for x in (rotated_query, rotated_key, value))
        products = rotated_key.transpose(2, 3) @ value  # [B,H,D,D]
        sums = key.sum(1, dtype=torch.float32).unsqueeze(-1)  # [B,H,D,1]
        state = sum_over_ranks(torch.cat([products, sums], -1), self.group)  # [B,H,D,D+1]
        total, norm = state.split_with_sizes([value.shape[-1], 1], -1)
        inverse = 1 / (query.transpose(1, 2) @ norm.to(query.dtype) + EPS)  # [B,H,n,1]
        attended = (rotated_query @ total * inverse).transpose(1, 2).flatten(2)
        return project_output(attn, attended.to(hidden_states.dtype))


class UlyssesSanaVideo(UlyssesLineTransformer):
    transformer_class = SanaVideoTransformer3DModel
    patch_embedding = "patch_embedding"
    shard_unit = "latent frames"
    original_processor = SanaLinearAttnProcessor3_0
    sharded_processor = SanaVideoLinearAttention
    convolution_name = "conv_temp"

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        frames, height, width = patch_grid(self.config, arguments["hidden_states"].shape[2:])
        lengths = self.frame_shard_sizes(frames, height * width)
        times = arguments["timestep"].reshape(len(arguments["hidden_states"]), -1)
        if times.shape[1] > 1:  # one timestep per token
            arguments["timestep"] = local_shard(times, 1, lengths, self.group)
        return lengths

    def frame_shard_sizes(self, frames: int, per_frame: int) -> list[int]:
        return [count * per_frame for count in shard_sizes(frames, self.num_ranks, self.shard_unit)]

    def shard_embedding(self, embedded: Tensor) -> Tensor:
        """Return the local tokens [batch, channels, local tokens] of the patch embedding [batch, channels, T, h, w]."""
        return self.copy_local_shard(embedded.flatten(2), 2)

    def shard_block_arguments(self, arguments: dict[str, Any]) -> None:
        per_frame = arguments["height"] * arguments["width"]
        lengths = self.frame_shard_sizes(arguments["frames"], per_frame)
        arguments["frames"] = lengths[self.rank] // per_frame
        arguments["rotary_emb"] = tuple(local_shard(table, 1, lengths, self.group) for table in arguments["rotary_emb"])
