"""Cosmos3: any tokens of a video and its actions can be shared.

Splits, in the tower that denoises (models/cosmos3_towers.py): what `sequence` passes on, which is all tokens with their
times. Keys and values of the text are whole on every rank, of which each takes those of its heads. Groups of query
heads share a head of keys: ranks get whole groups.
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

from wfm_ds.ulysses.base import SharedTokens
from wfm_ds.ulysses.exchange import own, reshard, shares

HEADS = "heads of keys and values"


class Cosmos3(SharedTokens):
    transformer = Cosmos3OmniTransformer
    patch_embedding = "sequence"

    def share_blocks(self, transformer: Any) -> None:
        attentions = [block.self_attn for block in transformer.layers]
        stock = [self.take_processor(attention, AttentionToText) for attention in attentions]
        for attention, processor in zip(attentions, stock, strict=True):
            attention.set_processor(AttentionToText(self.group, processor._attention_backend))

    def token_shares(self, arguments: dict[str, Any]) -> list[int]:
        actions = arguments.get("actions")
        count = math.prod(grid_of(self.config, arguments["latents"].shape[2:]))
        return shares(count + (0 if actions is None else actions.shape[1]), self.num_ranks, self.unit)

    @classmethod
    def check(cls, config: Any, num_ranks: int) -> None:
        shares(config.num_key_value_heads, num_ranks, f"{HEADS} of {cls.transformer.__name__}")

    @classmethod
    def check_shape(cls, config: Any, num_ranks: int, shape: Sequence[int]) -> None:
        shares(math.prod(grid_of(config, shape[1:])), num_ranks, cls.unit)


class AttentionToText:
    """Processor of the tower's attention: of all tokens to the text and to each other."""

    def __init__(self, group: ProcessGroup | None = None, backend: Any = None) -> None:
        """group: the ranks that share the tokens; None: this rank has all of them. backend: diffusers' name of a
        kernel."""
        self.group = group
        self._attention_backend = backend

    def __call__(
        self,
        attn: Any,
        tokens: Tensor,
        text_keys: Tensor,
        text_values: Tensor,
        text_mask: Tensor | None,
        rotation: Sequence[Tensor],
    ) -> Tensor:
        """tokens [B,n,W]: this rank's. text_keys, text_values [B,L,K,D], text_mask [B,L] bool, rotation: tables [B,N,D]
        of all tokens."""
        lengths, tables, group = [0], rotation, self.group
        if group is not None:
            lengths = shares(rotation[0].shape[1], dist.get_world_size(group), "tokens")
            tables = [own(table, 1, lengths, group) for table in rotation]
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, attn.head_dim))
            for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        )
        query, key = rotated(attn.norm_added_q(query), tables), rotated(attn.norm_added_k(key), tables)
        times = attn.heads // key.shape[2]  # query heads for each head of keys
        if group is None:
            attended = self.attend(query, key, value, text_keys, text_values, text_mask)
        else:
            of_keys = shares(key.shape[2], dist.get_world_size(group), HEADS)
            of_queries = [times * count for count in of_keys]
            key, value = reshard((key, value), 2, of_keys, 1, lengths, group)  # [B,N,k,D]
            (query,) = reshard((query,), 2, of_queries, 1, lengths, group)
            text = own(text_keys, 2, of_keys, group), own(text_values, 2, of_keys, group)
            (attended,) = reshard((self.attend(query, key, value, *text, text_mask),), 1, lengths, 2, of_queries, group)
        made: Tensor = attn.to_add_out(attended.flatten(-2))
        return made

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, text_keys: Tensor, text_values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """[B,N,heads,D] of whole sequences. Kernels differ in what they do about fewer heads of keys than of queries,
        and some refuse them: repeated, all can serve."""
        key, value = torch.cat([text_keys, key], 1), torch.cat([text_values, value], 1)
        times = query.shape[2] // key.shape[2]
        attended: Tensor = dispatch_attention_fn(
            query,
            key.repeat_interleave(times, 2),
            value.repeat_interleave(times, 2),
            attn_mask=None if mask is None else visible(mask, query.shape[1]),
            backend=self._attention_backend,
        )
        return attended


def grid_of(config: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    """Frames, rows and columns of the tokens of latents [T,h,w]: patches may overhang."""
    num_frames, height, width = shape
    patch = config.latent_patch_size
    return num_frames, math.ceil(height / patch), math.ceil(width / patch)


def rotated(x: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """[B,n,heads,D] turned by tables [B,n,D]: channel i with channel i + D / 2."""
    cos, sin = (table[:, :, None] for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def visible(text_mask: Tensor, num_tokens: int) -> Tensor:
    """[B,1,1,L+N] bool of a text_mask [B,L]: every token sees the text without its padding, and every token."""
    return nn.functional.pad(text_mask, (0, num_tokens), value=True)[:, None, None]
