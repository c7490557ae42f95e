"""The text tower and the generation tower of a Cosmos3 transformer as separate modules.

The text tower runs only once per text. Names of parameters and results are the same as in diffusers'
Cosmos3OmniTransformer.

Shapes: B samples, L text tokens, N video and action tokens, G layers, H heads, K key-value heads, D channels per head,
W channels per token, A channels per action.
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

from wfm_ds.ulysses.cosmos3 import Cosmos3Attention, rotate_halves, token_grid

RotaryTables = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, each [B samples, n tokens, D channels per head]."""
TEXT_TOWER_LAYERS = (
    *("embed_tokens.*", "norm.*", "lm_head.*", "layers.*.mlp.*"),
    *("layers.*.input_layernorm.*", "layers.*.post_attention_layernorm.*"),
    *("layers.*.self_attn.to_[qkv].*", "layers.*.self_attn.to_out.*"),
    *("layers.*.self_attn.norm_[qk].*", "layers.*.self_attn.k_norm_und_for_gen.*"),
)
"""Name patterns of parameters that only the text tower uses."""


def split_towers(transformer: Any) -> tuple[TextTower, GenerationTower]:
    """Split a diffusers transformer into its text tower and generation tower, which reuse its weights.

    Do not use the transformer afterwards.
    """
    text = TextTower(transformer)
    with torch.device("meta"):
        tower: GenerationTower = GenerationTower.from_config(transformer.config)
    names = tower.state_dict().keys()
    tower.load_state_dict({name: x for name, x in transformer.state_dict().items() if name in names}, assign=True)
    return text, tower.train(transformer.training)


class TextTower(nn.Module):
    """The frozen text encoder. It computes the attention keys and values of a text in every layer."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.embed_tokens = transformer.embed_tokens
        self.layers = nn.ModuleList(TextLayer(layer) for layer in transformer.layers)
        self.config = transformer.config

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of one text, after the rotary embedding.

        ids: int64 [tokens]. Keys and values: [tokens, layers, key-value heads, channels per head].
        """
        states = self.embed_tokens(ids)[None]
        positions = torch.arange(len(ids), dtype=torch.float32, device=ids.device).expand(3, 1, -1)
        rotation = compute_rotary_tables(self.config, positions, states.dtype)
        keys, values = [], []
        for layer in self.layers:
            states, key, value = layer(states, rotation)
            keys.append(key[0])
            values.append(value[0])
        return torch.stack(keys, 1), torch.stack(values, 1)


class TextLayer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.mlp, self.self_attn = layer.mlp, TextAttention(layer.self_attn)

    def forward(self, states: Tensor, rotation: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        attended, key, value = self.self_attn(self.input_layernorm(states), rotation)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states)), key, value


class TextAttention(nn.Module):
    """Causal self-attention of the text. Some networks have a separate norm for the keys that the video attends to."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim: int = attention.head_dim
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out, self.norm_q, self.norm_k = attention.to_out, attention.norm_q, attention.norm_k
        self.k_norm_und_for_gen: Any = attention.k_norm_und_for_gen

    def forward(self, states: Tensor, rotation: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention output [B,L,W], and the keys and values [B,L,K,D] that the video attends to."""
        query, key, value = (
            part(states).unflatten(-1, (-1, self.head_dim)) for part in (self.to_q, self.to_k, self.to_v)
        )
        query, key = self.norm_q(query), self.norm_k(key)
        video_key = key if self.k_norm_und_for_gen is None else self.k_norm_und_for_gen(key)
        attended = dispatch_attention_fn(
            rotate_halves(query, rotation), rotate_halves(key, rotation), value, is_causal=True, enable_gqa=True
        )
        return self.to_out(attended.flatten(-2)), rotate_halves(video_key, rotation), value


class GenerationTower(Cosmos3OmniTransformer):  # type: ignore[misc]
    """The denoising tower, which processes video, time and actions."""

    fps: float = 24.0  # frames per second of all videos
    temporal_compression: int = 4  # pixel frames per latent frame after the first

    # Keep the signature of the base class, because diffusers derives the config keys from it.
    @functools.wraps(Cosmos3OmniTransformer.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **config: Any) -> None:
        super().__init__(*arguments, **config)
        for name in ("embed_tokens", "norm", "lm_head", "rotary_emb"):
            delattr(self, name)
        layers = self.get_submodule("layers").children()
        self.sequence = nn.Identity()  # sequence parallelism shards the tokens at this module (ulysses/cosmos3.py)
        self.layers = nn.ModuleList(GenerationLayer(layer) for layer in layers)
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
        """Return the tuple (velocity [B,C,T,h,w],), like diffusers networks.

        latents: [B,C,T,h,w] in the compute dtype. time: [B] float32, 1000 * sigma.
        free: [B,T], 1 on noisy latent frames, 0 on conditioning frames.
        text_keys, text_values: [B, text tokens, layers, key-value heads, channels per head].
        text_mask: [B, text tokens] int64, 0 on padding.
        actions: [B, pixel frames - 1, channels], without noise. Action i leads from frame i to frame i + 1.
        domain: [B] int64, robot type of each sample.
        """
        shape, dtype = latents.shape, latents.dtype
        num_frames, rows, columns = token_grid(self.config, shape[2:])
        tokens = self.proj_in(self.patchify(latents))
        time_dtype = next(self.time_embedder.parameters()).dtype
        embedded = self.time_embedder(self.time_proj(time * self.config.timestep_scale).to(time_dtype)).to(dtype)
        noisy = free.to(dtype).repeat_interleave(rows * columns, 1)
        tokens = tokens + noisy[..., None] * embedded[:, None]
        after_text = text_mask.sum(1) + self.config.unified_3d_mrope_temporal_modality_margin  # [B]
        with tokens.device:
            positions = [self.video_positions(num_frames, rows, columns)]
        if actions is not None:
            # Noise-free action tokens. Action i has the time of frame i + 1.
            embedded_actions = self.action_proj_in(actions.to(dtype), domain) + self.action_modality_embed
            tokens = torch.cat([tokens, embedded_actions], 1)
            with tokens.device:
                times = self.temporal_positions(torch.arange(1, actions.shape[1] + 1), self.fps)
                positions.append(torch.stack([times, torch.zeros_like(times), torch.zeros_like(times)]))
        rotation = self.rotary_tables(torch.cat(positions, 1), after_text, dtype)
        tokens = self.sequence(tokens)
        # A single text has no padding and needs no mask. With a mask, the fast attention kernels could not be used.
        mask = None if len(latents) == 1 else text_mask.bool()
        for index, layer in enumerate(self.layers):
            text = text_keys[:, :, index].to(dtype), text_values[:, :, index].to(dtype), mask
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens = self._gradient_checkpointing_func(layer, tokens, *text, rotation)
            else:
                tokens = layer(tokens, *text, rotation)
        predicted = self.proj_out(self.norm_moe_gen(tokens))  # includes unused action predictions
        return (self.unpatchify(predicted[:, : num_frames * rows * columns], shape),)

    def patchify(self, latents: Tensor) -> Tensor:
        """Convert latents [B,C,T,h,w] to N patches of p x p latents, [B, N, p * p * C].

        Partial patches at the edges are filled with zeros.
        """
        patch, (_, rows, columns) = self.config.latent_patch_size, token_grid(self.config, latents.shape[2:])
        height, width = latents.shape[-2:]
        whole = nn.functional.pad(latents, (0, columns * patch - width, 0, rows * patch - height))
        patches = whole.view(*latents.shape[:3], rows, patch, columns, patch)
        return patches.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)

    def unpatchify(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        patch = self.config.latent_patch_size
        patches = tokens.view(len(tokens), *token_grid(self.config, shape[2:]), patch, patch, -1)  # channels last
        whole = patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        latents: Tensor = whole[..., : shape[-2], : shape[-1]]
        return latents

    def video_positions(self, num_frames: int, rows: int, columns: int) -> Tensor:
        """Return the positions (time, row, column) of all video tokens, float32 [3, tokens]. Frame 0 has time 0."""
        frames = self.temporal_positions(torch.arange(num_frames), self.fps / self.temporal_compression)
        axes = torch.meshgrid(frames, torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij")
        return torch.stack([axis.flatten() for axis in axes])

    def temporal_positions(self, index: Tensor, rate: float) -> Tensor:
        """Return the time positions of latent frames or actions.

        index: indices of the latent frames or actions. rate: number of latent frames or actions per second.
        """
        if not self.config.enable_fps_modulation or len(index) == 1:
            return index.float()
        positions: Tensor = index.float() / rate * (self.config.base_fps / self.temporal_compression)
        return positions

    def rotary_tables(self, positions: Tensor, after_text: Tensor, dtype: torch.dtype) -> RotaryTables:
        """Return the rotary cosines and sines of N tokens, each [batch, N, channels per head].

        positions: (time, row, column) of the tokens, [3, N]. after_text: [batch], first position after the text of each
        sample. It is added to the times and, depending on the config, to rows and columns.
        """
        shifted = positions[:, None].repeat(1, len(after_text), 1)  # [3,B,N]
        shifted[0] += after_text[:, None]
        if not self.config.unified_3d_mrope_reset_spatial_ids:
            shifted[1:] += after_text[:, None]
        return compute_rotary_tables(self.config, shifted, dtype)


class GenerationLayer(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn = GenerationAttention(layer.self_attn)
        self.mlp_moe_gen = layer.mlp_moe_gen
        self.input_layernorm_moe_gen = layer.input_layernorm_moe_gen
        self.post_attention_layernorm_moe_gen = layer.post_attention_layernorm_moe_gen

    def forward(
        self, tokens: Tensor, text_keys: Tensor, text_values: Tensor, text_mask: Tensor | None, rotation: RotaryTables
    ) -> Tensor:
        """Return the layer's output for the video and action tokens, in the shape of `tokens`.

        text_keys, text_values: [B, text tokens, key-value heads, channels per head].
        text_mask: [B, text tokens] bool, or None if no text has padding.
        """
        attended = self.self_attn(self.input_layernorm_moe_gen(tokens), text_keys, text_values, text_mask, rotation)
        tokens = tokens + attended
        output: Tensor = tokens + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(tokens))
        return output


class GenerationAttention(nn.Module, AttentionModuleMixin):  # type: ignore[misc]
    _default_processor_cls = Cosmos3Attention
    _available_processors = [Cosmos3Attention]  # noqa: RUF012, as in the base class
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
        self.processor: Any = Cosmos3Attention()

    def forward(self, *arguments: Any) -> Tensor:
        output: Tensor = self.processor(self, *arguments)
        return output


class DomainLinear(DomainAwareLinear):  # type: ignore[misc]
    """A linear layer with separate weights for each domain (robot type)."""

    def forward(self, x: Tensor, domain_id: Tensor) -> Tensor:
        """Map x [batch, tokens, in] to [batch, tokens, out]. domain_id: int64 [batch], selects the weights."""
        weight = self.fc(domain_id).view(len(x), self.input_size, self.output_size)
        output: Tensor = torch.bmm(x, weight) + self.bias(domain_id)[:, None]
        return output


def compute_rotary_tables(config: Any, positions: Tensor, dtype: torch.dtype) -> RotaryTables:
    """Return rotary cosines and sines, each [batch, tokens, channels per head], as diffusers' rotary embedding does.

    positions: float32 [3, batch, tokens]. dtype: dtype of the result. Angles are always computed in float32.
    """
    size, axes = config.head_dim, config.rope_axes_dim
    with positions.device:
        frequencies = 1 / config.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        channel = torch.arange(size // 2)
    cycle = channel % 3  # channels alternate between time, height and width; the remaining ones belong to time
    axis = sum(i * ((cycle == i) & (channel < 3 * axes[i])) for i in (1, 2))
    angles = positions[axis].movedim(0, -1) * frequencies
    twice = torch.cat([angles, angles], -1)
    return twice.cos().to(dtype), twice.sin().to(dtype)
