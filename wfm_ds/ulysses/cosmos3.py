"""Sequence parallelism for Cosmos3: a shard may start at any video or action token.

Text tokens are not split: every rank has all text keys and values, but uses only its key-value heads. A rank has whole
key-value heads, with all query heads that share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers import Cosmos3OmniTransformer
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.attention import shard_tables
from wfm_ds.ulysses.base import UlyssesTransformer
from wfm_ds.ulysses.exchange import local_shard, reshard, shard_sizes

KEY_VALUE_HEADS = "heads of keys and values"


class UlyssesCosmos3(UlyssesTransformer):
    transformer_class = Cosmos3OmniTransformer
    patch_embedding = "sequence"

    def shard_blocks(self, transformer: Any) -> None:
        self.replace_processors([layer.self_attn for layer in transformer.layers], Cosmos3Attention, Cosmos3Attention)

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        actions = arguments.get("actions")
        count = math.prod(token_grid(self.config, arguments["latents"].shape[2:]))
        return shard_sizes(count + (0 if actions is None else actions.shape[1]), self.num_ranks, self.shard_unit)

    @classmethod
    def check_config(cls, config: Any, num_ranks: int) -> None:
        shard_sizes(config.num_key_value_heads, num_ranks, f"{KEY_VALUE_HEADS} of {cls.transformer_class.__name__}")

    @classmethod
    def check_shape(cls, config: Any, num_ranks: int, shape: Sequence[int]) -> None:
        shard_sizes(math.prod(token_grid(config, shape[1:])), num_ranks, cls.shard_unit)


class Cosmos3Attention:
    """Attention processor of the generation tower. Video and action tokens attend to the text and to each other."""

    _attention_backend: Any = None  # name of an attention kernel in diffusers

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """group: the ranks over which tokens are sharded, or None."""
        self.group = group

    def __call__(
        self,
        attn: Any,
        tokens: Tensor,
        text_keys: Tensor,
        text_values: Tensor,
        text_mask: Tensor | None,
        rotation: Sequence[Tensor],
    ) -> Tensor:
        """Compute the attention of the local tokens to the text tokens and to the tokens of all ranks.

        tokens: local tokens [batch, local tokens, channels].
        text_keys, text_values: [batch, text tokens, key-value heads, channels per head].
        text_mask: bool [batch, text tokens], False on padding. None: no text is padded.
        rotation: rotary tables (cosines, sines) of the tokens of all ranks, [batch, tokens, channels per head] each.
        """
        group = self.group
        lengths, tables = ([0], rotation) if group is None else shard_tables(rotation, 1, group)
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, attn.head_dim))
            for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        query, key = rotate_halves(attn.norm_added_q(query), tables), rotate_halves(attn.norm_added_k(key), tables)
        queries_per_key = attn.heads // key.shape[2]
        if group is None:
            attended = self.attend_full(query, key, value, text_keys, text_values, text_mask)
        else:
            key_heads = shard_sizes(key.shape[2], dist.get_world_size(group), KEY_VALUE_HEADS)
            query_heads = [queries_per_key * count for count in key_heads]
            key, value = reshard((key, value), 2, key_heads, 1, lengths, group)  # [B,N,k,D]
            (query,) = reshard((query,), 2, query_heads, 1, lengths, group)
            text = local_shard(text_keys, 2, key_heads, group), local_shard(text_values, 2, key_heads, group)
            attended = self.attend_full(query, key, value, *text, text_mask)
            (attended,) = reshard((attended,), 1, lengths, 2, query_heads, group)
        result: Tensor = attn.to_add_out(attended.flatten(-2))
        return result

    def attend_full(
        self, query: Tensor, key: Tensor, value: Tensor, text_keys: Tensor, text_values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the attention output for complete sequences, [batch, tokens, heads, channels per head]."""
        key, value = torch.cat([text_keys, key], 1), torch.cat([text_values, value], 1)
        if mask is not None:  # only text padding is masked: [B, 1, 1, text tokens + tokens]
            mask = nn.functional.pad(mask, (0, query.shape[1]), value=True)[:, None, None]
        # Repeat key-value heads: some kernels require as many as query heads.
        queries_per_key = query.shape[2] // key.shape[2]
        attended: Tensor = dispatch_attention_fn(
            query,
            key.repeat_interleave(queries_per_key, 2),
            value.repeat_interleave(queries_per_key, 2),
            attn_mask=mask,
            backend=self._attention_backend,
        )
        return attended


def token_grid(config: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the grid of tokens (frames, rows, columns), with partial patches. shape: latent shape (frames, h, w)."""
    num_frames, height, width = shape
    patch = config.latent_patch_size
    return num_frames, math.ceil(height / patch), math.ceil(width / patch)


def rotate_halves(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Rotate channels i and i + D / 2 of x [B, tokens, heads, D] together. tables: cosines and sines [B, tokens, D]."""
    cos, sin = (table[:, :, None] for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
