"""Sequence parallelism for Stable Diffusion 3 and 3.5: image tokens and text tokens are sharded.

In diffusers' SD3Transformer2DModel, the outputs of `pos_embed` (image) and `context_embedder` (text) are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.attention import project_output, sequence_attention
from wfm_ds.ulysses.base import UlyssesTransformer, patch_grid
from wfm_ds.ulysses.exchange import shard_sizes


@dataclass(frozen=True, slots=True)
class JointLengths:
    """Numbers of image tokens and of text tokens on each rank."""

    image: list[int]
    text: list[int]

    @property
    def joint(self) -> list[int]:
        return [image + text for image, text in zip(self.image, self.text, strict=True)]


class UlyssesSD3(UlyssesTransformer):
    transformer_class = SD3Transformer2DModel
    patch_embedding = "pos_embed"
    shard_unit = "image tokens"
    unsupported_arguments: ClassVar = {"block_controlnet_hidden_states": "ControlNet residuals"}

    def shard_blocks(self, transformer: Any) -> None:
        self.text_lengths: list[int] = []
        attentions = [
            attention
            for block in transformer.transformer_blocks
            for attention in (block.attn, block.attn2)
            if attention is not None
        ]
        self.replace_processors(attentions, JointAttnProcessor2_0, SD3JointAttention)
        transformer.context_embedder.register_forward_hook(
            lambda module, args, embedded: self.copy_local_shard(embedded, 1, self.text_lengths)
        )

    def token_shard_sizes(self, arguments: dict[str, Any]) -> list[int]:
        grid = patch_grid(self.config, arguments["hidden_states"].shape[2:])
        image = shard_sizes(self.num_units(grid), self.num_ranks, self.shard_unit)
        self.text_lengths = shard_sizes(arguments["encoder_hidden_states"].shape[1], self.num_ranks, "text tokens")
        attention_kwargs = arguments.get("joint_attention_kwargs") or {}
        arguments["joint_attention_kwargs"] = {**attention_kwargs, "lengths": JointLengths(image, self.text_lengths)}
        return image


class SD3JointAttention:
    """Replacement for JointAttnProcessor2_0. Attends to image and text, or only to the image (`attn2` of SD3.5)."""

    _attention_backend: Any = None  # name of an attention kernel in diffusers

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        lengths: JointLengths | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the attention of local image and text tokens, [batch, local tokens, channels] each, to all tokens.

        lengths: numbers of image and text tokens on each rank.
        """
        assert self.group is None or lengths is not None
        image = project_qkv(hidden_states, attn.heads, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        backend = self._attention_backend
        if encoder_hidden_states is None:
            image_lengths = None if lengths is None else lengths.image
            return project_output(attn, sequence_attention(*image, image_lengths, self.group, backend).flatten(2))
        text = project_qkv(
            encoder_hidden_states,
            attn.heads,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
        )
        query, key, value = (torch.cat(pair, 1) for pair in zip(image, text, strict=True))
        joint_lengths = None if lengths is None else lengths.joint
        attended = sequence_attention(query, key, value, joint_lengths, self.group, backend).flatten(2)
        image_out, text_out = attended.split_with_sizes([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return project_output(attn, image_out), text_out if attn.context_pre_only else attn.to_add_out(text_out)


def project_qkv(
    tokens: Tensor, heads: int, layers: Sequence[Any], norms: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values after their norms, [batch, tokens, heads, channels per head] each."""
    query, key, value = (layer(tokens).unflatten(-1, (heads, -1)) for layer in layers)
    norm_query, norm_key = norms
    return query if norm_query is None else norm_query(query), key if norm_key is None else norm_key(key), value
