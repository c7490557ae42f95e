"""Stable Diffusion 3 and 3.5: image and text tokens are both shared, and attend to each other in one exchange.

Splits, in diffusers' SD3Transformer2DModel: the outputs of `pos_embed` (image) and `context_embedder` (text). The order
of tokens means nothing to its attention, so each rank's image and text tokens travel side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.ulysses.attention import attend, projected_out
from wfm_ds.ulysses.base import SharedTokens, patches
from wfm_ds.ulysses.exchange import shares


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each rank."""

    image: list[int]
    text: list[int]

    @property
    def joint(self) -> list[int]:
        return [image + text for image, text in zip(self.image, self.text, strict=True)]


class SD3(SharedTokens):
    transformer = SD3Transformer2DModel
    patch_embedding = "pos_embed"
    unit = "image tokens"
    refused: ClassVar = {"block_controlnet_hidden_states": "ControlNet residuals"}

    def share_blocks(self, transformer: Any) -> None:
        self.text_lengths: list[int] = []
        attentions = [
            attention
            for block in transformer.transformer_blocks
            for attention in (block.attn, block.attn2)
            if attention is not None
        ]
        for attention in attentions:
            self.take_processor(attention, JointAttnProcessor2_0)
        for attention in attentions:
            attention.set_processor(JointAttention(self.group))
        transformer.context_embedder.register_forward_hook(self._split_text)

    def token_shares(self, arguments: dict[str, Any]) -> list[int]:
        grid = patches(arguments["hidden_states"].shape[2:], [self.config.patch_size] * 2)
        image = shares(self.num_units(grid), self.num_ranks, self.unit)
        self.text_lengths = shares(arguments["encoder_hidden_states"].shape[1], self.num_ranks, "text tokens")
        given = arguments.get("joint_attention_kwargs") or {}
        arguments["joint_attention_kwargs"] = {**given, "lengths": Lengths(image, self.text_lengths)}
        return image

    def _split_text(self, _: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        return self.own(embedded, 1, self.text_lengths)


class JointAttention:
    """Processor in place of JointAttnProcessor2_0: image and text together, or the image alone (`attn2` of SD3.5)."""

    _attention_backend: Any = None  # one of diffusers' kernels

    def __init__(self, group: ProcessGroup | None) -> None:
        """group: the ranks that share the tokens; None: this rank has all of them."""
        self.group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states [B,n,C] and encoder_hidden_states [B,m,C]: this rank's image and text tokens. lengths: of all
        ranks, where there is a group."""
        image = projected(
            hidden_states, attn.heads, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k, None)
        )
        if encoder_hidden_states is None:
            return projected_out(attn, self.attend(image, None if lengths is None else lengths.image))
        text = projected(
            encoder_hidden_states,
            attn.heads,
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k, None),
        )
        joint = [torch.cat(pair, 1) for pair in zip(image, text, strict=True)]
        attended = self.attend(joint, None if lengths is None else lengths.joint)
        of_image, of_text = attended.split_with_sizes([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return projected_out(attn, of_image), of_text if attn.context_pre_only else attn.to_add_out(of_text)

    def attend(self, qkv: Sequence[Tensor], lengths: Sequence[int] | None) -> Tensor:
        query, key, value = qkv
        if self.group is None:
            whole: Tensor = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
            return whole.flatten(2)
        assert lengths is not None
        return attend(query, key, value, lengths, self.group, self._attention_backend).flatten(2)


def projected(tokens: Tensor, heads: int, layers: Sequence[Any], norms: Sequence[Any]) -> list[Tensor]:
    """Queries, keys and values, [B,n,H,D] each."""
    qkv = [layer(tokens).unflatten(-1, (heads, -1)) for layer in layers]
    return [x if norm is None else norm(x) for x, norm in zip(qkv, norms, strict=True)]
