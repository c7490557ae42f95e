"""The two towers of a Cosmos3 transformer, taken apart: one reads the text, one denoises.

In each layer the tokens of the video attend to themselves and to the keys and values of the text; the text sees
neither the video nor the time. So what the text tower computes is an embedding of the text, made once for each, and the
network that is trained and sampled from is the other tower alone: half of the parameters. Parameters keep the names
that they have in diffusers' Cosmos3OmniTransformer; the numbers are those of its forward, for whole batches.

Shapes: B samples, L tokens of text, N of video and actions, G layers, H heads, K heads of keys and values, D channels
of a head, W channels of a token, A of an action.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_cosmos3 import DomainAwareLinear
from torch import Tensor, nn

from wfm_ds.ulysses.cosmos3 import AttentionToText, grid_of, rotated

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [B,n,D]."""
OF_TEXT = (
    *("embed_tokens.*", "norm.*", "lm_head.*", "layers.*.mlp.*"),
    *("layers.*.input_layernorm.*", "layers.*.post_attention_layernorm.*"),
    *("layers.*.self_attn.to_[qkv].*", "layers.*.self_attn.to_out.*"),
    *("layers.*.self_attn.norm_[qk].*", "layers.*.self_attn.k_norm_und_for_gen.*"),
)
"""Patterns of the names of what the text alone uses."""


def split(stock: Any) -> tuple[TextTower, GenerationTower]:
    """Both towers of a stock transformer, with its weights; it must not be used afterwards."""
    text = TextTower(stock)
    with torch.device("meta"):
        tower: GenerationTower = GenerationTower.from_config(stock.config)
    wanted = tower.state_dict().keys()
    tower.load_state_dict({name: x for name, x in stock.state_dict().items() if name in wanted}, assign=True)
    return text, tower.train(stock.training)


class TextTower(nn.Module):
    """Keys and values of a text in every layer. Frozen: the text encoder of this family."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.embed_tokens = stock.embed_tokens
        self.layers = nn.ModuleList(TextLayer(layer) for layer in stock.layers)
        self.config = stock.config

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [L,G,K,D] of one text's ids [L] int64: turned by their position, as the video meets them."""
        states = self.embed_tokens(ids)[None]
        positions = torch.arange(len(ids), dtype=torch.float32, device=ids.device).expand(3, 1, -1)
        rotation = tables(self.config, positions, states.dtype)
        keys, values = [], []
        for layer in self.layers:
            states, key, value = layer(states, rotation)
            keys.append(key[0])
            values.append(value[0])
        return torch.stack(keys, 1), torch.stack(values, 1)


class TextLayer(nn.Module):
    """The text's part of a stock layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp, self.self_attn = layer.mlp, TextAttention(layer.self_attn)

    def forward(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.self_attn(self.input_layernorm(states), rotation)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states)), key, value


class TextAttention(nn.Module):
    """Causal attention of the text, and the keys that the video sees: some networks normalise these alone."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim: int = attention.head_dim
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out, self.norm_q, self.norm_k = attention.to_out, attention.norm_q, attention.norm_k
        self.k_norm_und_for_gen: Any = attention.k_norm_und_for_gen

    def forward(self, states: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the text gains [B,L,W], and its keys and values [B,L,K,D] for the video."""
        query, key, value = (
            part(states).unflatten(-1, (-1, self.head_dim)) for part in (self.to_q, self.to_k, self.to_v)
        )
        query, key = self.norm_q(query), self.norm_k(key)
        seen = key if self.k_norm_und_for_gen is None else self.k_norm_und_for_gen(key)
        attended = dispatch_attention_fn(
            rotated(query, rotation), rotated(key, rotation), value, is_causal=True, enable_gqa=True
        )
        return self.to_out(attended.flatten(-2)), rotated(seen, rotation), value


class GenerationTower(Cosmos3OmniTransformer):  # type: ignore[misc]
    """The tower that denoises. Its configuration is that of the stock network, its parameters are those of the stock
    network that a video, its time and its actions use, and the heads of modalities that are not trained here."""

    fps: float = 24.0  # of all videos
    temporal_compression: int = 4  # frames of a video for one of its latents, but for the first

    # diffusers reads the names of a configuration from the signature.
    @functools.wraps(Cosmos3OmniTransformer.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **config: Any) -> None:
        super().__init__(*arguments, **config)
        for name in ("embed_tokens", "norm", "lm_head", "rotary_emb"):
            delattr(self, name)
        stock = self.get_submodule("layers").children()
        self.sequence = nn.Identity()  # where ranks take their share of all tokens (ulysses/cosmos3.py)
        self.layers = nn.ModuleList(GenerationLayer(layer) for layer in stock)
        if self.config.action_gen:
            self.action_proj_in = DomainLinear(self.action_dim, self.config.hidden_size, self.num_embodiment_domains)

    def forward(
        self,
        latents: Tensor,
        time: Tensor,
        free: Tensor,
        text_keys: Tensor,
        text_values: Tensor,
        text_mask: Tensor,
        actions: Tensor | None = None,
        domain: Tensor | None = None,
    ) -> tuple[Tensor]:
        """Velocity [B,C,T,h,w] of latents in the compute dtype; a tuple, as of diffusers' networks.

        time [B] float32, of sigma times 1000; free [B,T]: 1 on frames that are noisy, 0 on given ones. text_keys,
        text_values [B,L,G,K,D], text_mask [B,L] int64: 0 on padding. actions [B,F-1,A] with the domain [B] int64 of
        their weights: they are clean, row i leads from frame i to frame i + 1.
        """
        shape, dtype = latents.shape, latents.dtype
        num_frames, rows, columns = grid_of(self.config, shape[2:])
        tokens = self.proj_in(self.patchified(latents))
        embedded = self.time_embedder(self.time_proj(time * self.config.timestep_scale).to(self.time_dtype)).to(dtype)
        noisy = free.to(dtype).repeat_interleave(rows * columns, 1)
        tokens = tokens + noisy[..., None] * embedded[:, None]
        after_text = text_mask.sum(1) + self.config.unified_3d_mrope_temporal_modality_margin  # [B]
        with tokens.device:
            positions = [self.video_positions(num_frames, rows, columns)]
        if actions is not None:
            tokens = torch.cat([tokens, self.embedded_actions(actions.to(dtype), domain)], 1)
            with tokens.device:
                positions.append(self.action_positions(actions.shape[1]))
        rotation = self.rotation(torch.cat(positions, 1), after_text, dtype)
        tokens = self.sequence(tokens)
        # A text alone has no padding. A mask would keep the fast kernels away.
        mask = None if len(latents) == 1 else text_mask.bool()
        for index, layer in enumerate(self.layers):
            of_text = text_keys[:, :, index].to(dtype), text_values[:, :, index].to(dtype), mask
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens = self._gradient_checkpointing_func(layer, tokens, *of_text, rotation)
            else:
                tokens = layer(tokens, *of_text, rotation)
        predicted = self.proj_out(self.norm_moe_gen(tokens))  # of actions too, which nobody asks for
        return (self.unpatchified(predicted[:, : num_frames * rows * columns], shape),)

    @property
    def time_dtype(self) -> torch.dtype:
        """The dtype of the layers that embed time, which may differ from the others'."""
        dtype: torch.dtype = next(self.time_embedder.parameters()).dtype
        return dtype

    def patchified(self, latents: Tensor) -> Tensor:
        """[B,N,p p C], with zeros at the edge where patches overhang."""
        patch, (_, rows, columns) = self.config.latent_patch_size, grid_of(self.config, latents.shape[2:])
        height, width = latents.shape[-2:]
        whole = nn.functional.pad(latents, (0, columns * patch - width, 0, rows * patch - height))
        cut = whole.view(*latents.shape[:3], rows, patch, columns, patch)
        return cut.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)

    def unpatchified(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Undo patchified, for latents of this shape."""
        patch = self.config.latent_patch_size
        cut = tokens.view(len(tokens), *grid_of(self.config, shape[2:]), patch, patch, -1)  # the channels are last
        whole = cut.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        made: Tensor = whole[..., : shape[-2], : shape[-1]]
        return made

    def embedded_actions(self, actions: Tensor, domain: Tensor | None) -> Tensor:
        """[B,F-1,W] of clean actions: they have no time."""
        made: Tensor = self.action_proj_in(actions, domain) + self.action_modality_embed
        return made

    def video_positions(self, num_frames: int, rows: int, columns: int) -> Tensor:
        """Position [3,N] float32 along time, height and width, the first frame of a video at time 0."""
        frames = self.moments(torch.arange(num_frames), self.fps / self.temporal_compression)
        axes = torch.meshgrid(frames, torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
        return torch.stack([axis.flatten() for axis in axes])

    def action_positions(self, count: int) -> Tensor:
        """Position [3,count] float32 of actions: at the frame that each leads to."""
        time = self.moments(torch.arange(1, count + 1), self.fps)
        return torch.stack([time, torch.zeros(count), torch.zeros(count)])

    def moments(self, index: Tensor, rate: float) -> Tensor:
        """Positions in time of these items of a stream that has `rate` of them a second."""
        if not self.config.enable_fps_modulation or len(index) == 1:
            return index.float()
        moments: Tensor = index.float() / rate * (self.config.base_fps / self.temporal_compression)
        return moments

    def rotation(self, positions: Tensor, after_text: Tensor, dtype: torch.dtype) -> Rotation:
        """Tables [B,N,D] for positions [3,N] that begin behind each sample's text."""
        moved = positions[:, None].repeat(1, len(after_text), 1)  # [3,B,N]
        moved[0] += after_text[:, None]
        if not self.config.unified_3d_mrope_reset_spatial_ids:
            moved[1:] += after_text[:, None]
        return tables(self.config, moved, dtype)


class GenerationLayer(nn.Module):
    """The part of a stock layer that denoises."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn = GenerationAttention(layer.self_attn)
        self.mlp_moe_gen = layer.mlp_moe_gen
        self.input_layernorm_moe_gen = layer.input_layernorm_moe_gen
        self.post_attention_layernorm_moe_gen = layer.post_attention_layernorm_moe_gen

    def forward(
        self, tokens: Tensor, text_keys: Tensor, text_values: Tensor, text_mask: Tensor | None, rotation: Rotation
    ) -> Tensor:
        """Tokens [B,N,W]; text_keys, text_values [B,L,K,D]; text_mask [B,L] bool."""
        attended = self.self_attn(self.input_layernorm_moe_gen(tokens), text_keys, text_values, text_mask, rotation)
        tokens = tokens + attended
        changed: Tensor = tokens + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(tokens))
        return changed


class GenerationAttention(nn.Module, AttentionModuleMixin):  # type: ignore[misc]
    """The projections of a stock attention that serve the tokens of the video."""

    _default_processor_cls = AttentionToText
    _available_processors = [AttentionToText]  # noqa: RUF012, as the base class has it
    _supports_qkv_fusion = False

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads: int = attention.num_attention_heads
        self.head_dim: int = attention.head_dim
        self.inner_dim = self.heads * self.head_dim
        self.add_q_proj: nn.Module = attention.add_q_proj
        self.add_k_proj: nn.Module = attention.add_k_proj
        self.add_v_proj: nn.Module = attention.add_v_proj
        self.to_add_out: nn.Module = attention.to_add_out
        self.norm_added_q: nn.Module = attention.norm_added_q
        self.norm_added_k: nn.Module = attention.norm_added_k
        self.processor: Any = AttentionToText()

    def forward(self, *arguments: Any) -> Tensor:
        made: Tensor = self.processor(self, *arguments)
        return made


class DomainLinear(DomainAwareLinear):  # type: ignore[misc]
    """A layer with weights for each domain, which looks them up without waiting for the device as the stock one does.
    Domains are checked where they enter."""

    def forward(self, x: Tensor, domain_id: Tensor) -> Tensor:
        """[B,n,out] of x [B,n,in] with the weights of domain_id [B] int64."""
        weight = self.fc(domain_id).view(len(x), self.input_size, self.output_size)
        made: Tensor = torch.bmm(x, weight) + self.bias(domain_id)[:, None]
        return made


def tables(config: Any, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [B,n,D] for positions [3,B,n] float32: what the stock network's module gives.

    That has its frequencies in a buffer, and whoever casts the network to bfloat16 casts them: at position 15000 they
    would turn by any angle."""
    size, axes = config.head_dim, config.rope_axes_dim
    with positions.device:
        frequencies = 1 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        channel = torch.arange(size // 2)
    turn = channel % 3  # time, height and width by turns, as long as an axis has channels left; then time
    axis = sum(which * ((turn == which) & (channel < 3 * axes[which])) for which in (1, 2))
    angles = positions[axis].movedim(0, -1) * frequencies
    twice = torch.cat([angles, angles], -1)
    return twice.cos().to(dtype), twice.sin().to(dtype)
