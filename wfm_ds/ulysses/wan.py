"""Sequence parallelism for Wan 2.1 and 2.2: a shard may start at any token of a video.

In diffusers' WanTransformer3DModel, the output of `patch_embedding` is sharded, and timesteps if there is one for each
token (TI2V). `attn1` exchanges tokens after the rotary embedding. `attn2` (attention to text and image embeddings)
needs no exchange.
"""

from __future__ import annotations

from typing import Any

from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.attention import apply_rotation, project_output, sequence_attention, shard_tables
from wfm_ds.ulysses.base import UlyssesTransformer, patch_grid
from wfm_ds.ulysses.exchange import local_shard, shard_sizes


class UlyssesWan(UlyssesTransformer):
    transformer_class = WanTransformer3DModel
    patch_embedding = "patch_embedding"

    def shard_blocks(self, transformer: Any) -> None:
        self.replace_processors([block.attn1 for block in transformer.blocks], WanAttnProcessor, WanSelfAttention)

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        grid = patch_grid(self.config, arguments["hidden_states"].shape[2:])
        lengths = shard_sizes(self.num_units(grid), self.num_ranks, self.shard_unit)
        if arguments["timestep"].ndim == 2:  # [B,S]
            arguments["timestep"] = local_shard(arguments["timestep"], 1, lengths, self.group)
        return lengths

    def shard_embedding(self, embedded: Tensor) -> Tensor:
        """Return the local tokens [batch, channels, local tokens] of the patch embedding [batch, channels, T, h, w]."""
        return self.copy_local_shard(embedded.flatten(2), 2)


class WanSelfAttention:
    """Replacement for WanAttnProcessor in self-attention."""

    _attention_backend: Any = None  # name of an attention kernel in diffusers

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute the attention of the local tokens [batch, local tokens, channels] to all tokens.

        rotary_emb: rotary tables (cosines, sines) of all tokens, [1, tokens, 1, channels per head] each.
        """
        assert rotary_emb is not None
        lengths, tables = shard_tables([table[0, :, 0] for table in rotary_emb], 0, self.group)
        query, key, value = (
            x.unflatten(2, (attn.heads, -1))
            for x in (
                attn.norm_q(attn.to_q(hidden_states)),
                attn.norm_k(attn.to_k(hidden_states)),
                attn.to_v(hidden_states),
            )
        )
        query, key = apply_rotation(query, tables, "neighbours"), apply_rotation(key, tables, "neighbours")
        attended = sequence_attention(query, key, value, lengths, self.group, self._attention_backend)
        return project_output(attn, attended.flatten(2))
