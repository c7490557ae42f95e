"""HunyuanVideo-1.5, text to video. The text encoders are Qwen2.5-VL and, for quoted texts, ByT5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock
from torch import Tensor, nn
from torch.nn import functional

from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel, require_prompts
from wfm_ds.models.lora_layer_names import JOINT_ATTENTION_LAYERS
from wfm_ds.models.text_padding import pad_and_stack
from wfm_ds.models.vae import count_latent_frames, require_multiples
from wfm_ds.types import Conditioning

EMBEDS, MASK = "prompt_embeds", "prompt_embeds_mask"
GLYPHS, GLYPH_MASK = "glyph_embeds", "glyph_embeds_mask"  # texts in quotation marks, which the video shows
# Layers for images and for quoted texts, without gradient if no caption of a batch has a quoted text, and text layers
# of the last block.
UNUSED_LAYERS = ("image_embedder", "context_embedder_2")
UNUSED_TEXT_LAYERS = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context")
SUPPORTED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "transformer/config.json": {"use_meanflow": False, "patch_size": 1, "patch_size_t": 1},
    "guider/guider_config.json": {
        "_class_name": "ClassifierFreeGuidance",
        "guidance_rescale": 0.0,
        "use_original_formulation": False,
        "start": 0.0,
        "stop": 1.0,
    },
}


class BatchedHunyuanVideo15(HunyuanVideo15Transformer3DModel):  # type: ignore[misc]
    """The diffusers network with a `forward` for text to video. It does not read tensor values.

    The `forward` of diffusers sorts text tokens by their masks and appends image tokens that no other token attends to.
    Both have no effect on the output, because text tokens have no positions.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        encoder_hidden_states_2: Tensor,
        encoder_attention_mask_2: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Return the velocity [B,C,T,h,w] for latents with conditioning channels [B, 2 C + 1, T, h, w].

        timestep: [B] float32. encoder_hidden_states: text embeddings [B, tokens, channels], encoder_hidden_states_2:
        embeddings of quoted texts, which may have 0 tokens. The masks are int64 [B, tokens], 0 on padding.
        """
        size, is_single = hidden_states.shape[2:], len(hidden_states) == 1
        rope, time = self.rope(hidden_states), self.time_embed.time_proj(timestep).to(hidden_states.dtype)
        time = self.time_embed.timestep_embedder(time)
        # A single text has no padding and needs no mask. With a mask, fast kernels could not be used.
        mask = None if is_single else encoder_attention_mask
        kinds = self.cond_type_embed(torch.arange(2, device=timestep.device))
        text = self.context_embedder(encoder_hidden_states, timestep, mask) + kinds[0]
        text = torch.cat([self.context_embedder_2(encoder_hidden_states_2) + kinds[1], text], dim=1)
        tokens = self.x_embedder(hidden_states)
        attended = None
        if not is_single:
            text_mask = torch.cat([encoder_attention_mask_2, encoder_attention_mask], dim=1).bool()
            attended = functional.pad(text_mask, (tokens.shape[1], 0), value=True)[:, None, None]
        for block in self.transformer_blocks:
            arguments = (tokens, text, time, attended, rope)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                tokens, text = self._gradient_checkpointing_func(block, *arguments)
            else:
                tokens, text = block(*arguments)
        velocity: Tensor = self.proj_out(self.norm_out(tokens, time))
        return (velocity.transpose(1, 2).reshape(len(velocity), -1, *size),)


class HunyuanVideo15(DiffusionModel):
    """HunyuanVideo-1.5. The network receives the timestep num_train_timesteps * sigma and returns the velocity.

    The diffusers pipeline takes the guidance scale from its component `guider`.
    """

    family = "hunyuan_video15"
    pipeline_classes = ("HunyuanVideo15Pipeline",)
    required_components = (
        *("transformer", "vae", "scheduler", "guider"),
        *("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
    )
    supported_options = SUPPORTED_OPTIONS
    conditioning_keys = frozenset({EMBEDS, MASK, GLYPHS, GLYPH_MASK})
    default_lora_targets = JOINT_ATTENTION_LAYERS
    block_classes = (HunyuanVideo15TransformerBlock,)
    default_image_size = 640  # as many pixels as 480 x 848
    is_video = True

    def __init__(self, pipeline: Any, path: Path, *, max_sequence_length: int | None = None, **options: Any) -> None:
        """Raise ModelError if max_sequence_length is set or the network has other inputs."""
        if max_sequence_length is not None:
            raise ModelError(f"{path}: the pipeline has no max_sequence_length; remove model.max_sequence_length")
        super().__init__(pipeline, path, max_sequence_length=pipeline.tokenizer_max_length, **options)
        channels = pipeline.vae.config.latent_channels
        if self.config.in_channels != 2 * channels + 1:
            raise ModelError(
                f"{path}: a network with {self.config.in_channels} input channels is not supported, only "
                f"{2 * channels + 1} (latents, conditioning latents, mask); use a HunyuanVideo15Pipeline"
            )
        pipeline.vae.enable_tiling()  # without tiles, the mask of the VAE's attention has 10 GB for 121 frames
        for block in pipeline.vae.modules():
            if isinstance(block, HunyuanVideo15AttnBlock):
                block.prepare_causal_attention_mask = make_causal_mask

    def extract_denoiser(self, pipeline: Any) -> nn.Module:
        denoiser: nn.Module = pipeline.transformer
        denoiser.__class__ = BatchedHunyuanVideo15  # same layers and weights, different forward
        for block in pipeline.transformer.transformer_blocks:
            block.attn.set_processor(HunyuanVideoAttnProcessor2_0())  # the same attention, with any mask
        return denoiser

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        last = f"transformer_blocks.{self.config.num_layers - 1}"
        return tuple(f"{layer}.*" for layer in (*UNUSED_LAYERS, *(f"{last}.{name}" for name in UNUSED_TEXT_LAYERS)))

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return the embeddings of prompts and of the quoted texts in them, without padding for a single prompt.

        {prompt_embeds, glyph_embeds: [batch, tokens, channels], prompt_embeds_mask, glyph_embeds_mask: int64 [batch,
        tokens]}. If no prompt has a quoted text, glyph_embeds has 0 tokens.
        """
        require_prompts(prompts)
        encoded = self.pipeline.encode_prompt(list(prompts), device=self.device, batch_size=len(prompts))
        rows = []
        for embeds, mask, glyphs, glyph_mask in zip(*encoded, strict=True):
            text, quoted = embeds[mask.bool()][None], glyphs[glyph_mask.bool()][None]
            rows.append({EMBEDS: text, MASK: ones_mask(text), GLYPHS: quoted, GLYPH_MASK: ones_mask(quoted)})
        return self.stack_conditioning(rows)

    @staticmethod
    def stack_conditioning(rows: Sequence[Conditioning]) -> Conditioning:
        return pad_and_stack(rows, (EMBEDS, MASK), (GLYPHS, GLYPH_MASK))

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        length, glyph_length = self.pipeline.tokenizer_max_length, self.pipeline.tokenizer_2_max_length
        return {
            EMBEDS: (length, self.config.text_embed_dim),
            MASK: (length,),
            GLYPHS: (glyph_length, self.config.text_embed_2_dim),
            GLYPH_MASK: (glyph_length,),
        }

    def denoise(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None) -> Tensor:
        self.check_denoise(latents, sigma, conditioning, expert)
        zeros = self.config.in_channels - latents.shape[1]  # channels of conditioning frames and their mask
        velocity: Tensor = self.denoiser(
            hidden_states=functional.pad(latents, (0, 0, 0, 0, 0, 0, 0, zeros)).to(self.dtype),
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=conditioning[EMBEDS].to(self.dtype),
            encoder_attention_mask=conditioning[MASK],
            encoder_hidden_states_2=conditioning[GLYPHS].to(self.dtype),
            encoder_attention_mask_2=conditioning[GLYPH_MASK],
            return_dict=False,
        )[0]
        return velocity.float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, (F - 1) / 4 + 1, H / 16, W / 16) for F frames of H x W pixels."""
        factor, config = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae.config
        require_multiples(height, width, factor)
        num_latent_frames = count_latent_frames(num_frames, self.pipeline.vae_scale_factor_temporal)
        return (config.latent_channels, num_latent_frames, height // factor, width // factor)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return math.prod(shape[1:])

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        return {"sigmas": np.linspace(1.0, 0.0, num_steps + 1)[:-1]}

    def text_call_kwargs(self) -> dict[str, Any]:
        return {}

    def pipeline_call_kwargs(self, w: float, height: int, width: int, num_frames: int = 1) -> dict[str, Any]:
        """Return the pipeline call arguments. The guidance scale is not one of them, see `guider_config`."""
        return {"height": height, "width": width, "num_frames": num_frames}


def make_causal_mask(num_frames: int, frame_size: int, dtype: Any, device: torch.device, batch_size: Any) -> Tensor:
    """Return which latents of a video each latent of the VAE sees: the latents of its frame and of earlier frames.

    bool [tokens, tokens]. Unlike the mask of diffusers, it is not built row by row, and it fits several videos.
    """
    frame = torch.arange(num_frames * frame_size, device=device) // frame_size
    return frame[:, None] >= frame


def ones_mask(embeds: Tensor) -> Tensor:
    return torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
