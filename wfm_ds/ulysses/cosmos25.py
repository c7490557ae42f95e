"""Sequence parallelism for Cosmos-Predict2.5: a shard may start at any token of a video.

In diffusers' CosmosTransformer3DModel, the outputs of `patch_embed`, `learnable_pos_embed` and `time_embed` are
sharded. `attn1` exchanges tokens after the rotary embedding. `attn2` (attention to text and image context) needs no
exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.attention import apply_rotation, project_output, sequence_attention, shard_tables
from wfm_ds.ulysses.base import UlyssesTransformer, patch_grid
from wfm_ds.ulysses.exchange import shard_sizes


class UlyssesCosmos25(UlyssesTransformer):
    transformer_class = CosmosTransformer3DModel
    patch_embedding = "patch_embed"
    unsupported_arguments: ClassVar = {"block_controlnet_hidden_states": "ControlNet residuals"}

    def shard_blocks(self, transformer: Any) -> None:
        self.frames: tuple[int, int] | None = None  # (batch size, frames) if each frame has its own timestep
        attentions = [block.attn1 for block in transformer.transformer_blocks]
        self.replace_processors(attentions, CosmosAttnProcessor2_0, Cosmos25Attention)
        transformer.time_embed.register_forward_hook(self._shard_time_embeddings)
        if transformer.learnable_pos_embed is not None:
            transformer.learnable_pos_embed.register_forward_hook(
                lambda module, args, output: self.copy_local_shard(output, 1)
            )

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        """Return the number of tokens of each rank. If each frame has a timestep, flatten `arguments["timestep"]`."""
        latents, timestep = arguments["hidden_states"], arguments["timestep"]
        count, _, num_frames, *_ = latents.shape
        grid = patch_grid(self.config, latents.shape[2:])
        per_frame = grid[0] == num_frames and timestep.shape == (count, 1, num_frames, 1, 1)
        self.frames = (count, num_frames) if per_frame else None
        if per_frame:  # the transformer would expand unflattened timesteps to all tokens
            arguments["timestep"] = timestep.flatten()
        return shard_sizes(self.num_units(grid), self.num_ranks, self.shard_unit)

    def shard_embedding(self, embedded: Tensor) -> Tensor:
        """Return the local tokens of the patch embedding [batch, frames, rows, columns, channels].

        The result is [batch, local tokens, 1, 1, channels].
        """
        return self.copy_local_shard(embedded.flatten(1, 3), 1)[:, :, None, None]

    def _shard_time_embeddings(self, _: nn.Module, args: Any, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Expand time embeddings [batch * frames, channels] to the local tokens [batch, local tokens, channels].

        Time embeddings with one row per sample are returned unchanged.
        """
        if self.frames is None:
            return embeddings
        count, num_frames = self.frames
        per_frame = sum(self.lengths) // num_frames
        start = sum(self.lengths[: self.rank])
        stop = start + self.lengths[self.rank]
        first, last = start // per_frame, -(-stop // per_frame)  # frames of the local tokens
        frame_embeddings = [x.view(count, num_frames, 1, -1)[:, first:last] for x in embeddings]
        token_embeddings = [x.expand(-1, -1, per_frame, -1).flatten(1, 2) for x in frame_embeddings]
        return tuple(x[:, start - first * per_frame : stop - first * per_frame] for x in token_embeddings)


class Cosmos25Attention:
    """Replacement for CosmosAttnProcessor2_0: self-attention with sharded tokens, and cross-attention."""

    _attention_backend: Any = None  # name of an attention kernel in diffusers

    def __init__(self, group: ProcessGroup | None) -> None:
        """group: the ranks over which self-attention is sharded, or None if it is not sharded."""
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute self-attention of the local tokens to all tokens, or cross-attention of the local tokens to text.

        hidden_states: local tokens [batch, local tokens, channels].
        encoder_hidden_states: text [batch, text tokens, channels]. None selects self-attention.
        image_rotary_emb: rotary tables (cosines, sines) of all tokens.
        """
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            layer(x).unflatten(2, (attn.heads, -1))
            for layer, x in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        lengths: list[int] | None = None
        if image_rotary_emb is not None:
            tables: Sequence[Tensor] = image_rotary_emb
            if self.group is not None:
                lengths, tables = shard_tables(tables, 0, self.group)
            query, key = apply_rotation(query, tables, "halves"), apply_rotation(key, tables, "halves")
        group = None if lengths is None else self.group  # the text of a cross-attention is not sharded
        attended = sequence_attention(query, key, value, lengths, group, self._attention_backend, mask=attention_mask)
        return project_output(attn, attended.flatten(2))
