"""Stable Diffusion 3 and 3.5. The text encoders are CLIP-L, CLIP-G and optionally T5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor

from wfm_ds.errors import ModelError
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.guidance import GuidancePass, choose_rows, format_blocks, parse_blocks
from wfm_ds.models.lora_layer_names import JOINT_ATTENTION_LAYERS, map_fused_layers, map_layers
from wfm_ds.models.vae import count_patches
from wfm_ds.recipe.sampling import SamplingRecipe, is_inside
from wfm_ds.types import Conditioning

BLOCK, JOINT = "transformer_blocks.{}", "joint_blocks.{}"
QKV = ("to_q", "to_k", "to_v")
LORA_NAMES = (
    *map_fused_layers(f"{BLOCK}.attn", QKV, f"{JOINT}.x_block.attn.qkv"),
    *map_fused_layers(f"{BLOCK}.attn", ("add_q_proj", "add_k_proj", "add_v_proj"), f"{JOINT}.context_block.attn.qkv"),
    *map_fused_layers(f"{BLOCK}.attn2", QKV, f"{JOINT}.x_block.attn2.qkv"),
    *map_layers(
        BLOCK,
        f"{JOINT}.x_block",
        {
            "attn.to_out.0": "attn.proj",
            "attn2.to_out.0": "attn2.proj",
            "ff.net.0.proj": "mlp.fc1",
            "ff.net.2": "mlp.fc2",
        },
    ),
    *map_layers(
        BLOCK,
        f"{JOINT}.context_block",
        {"attn.to_add_out": "attn.proj", "ff_context.net.0.proj": "mlp.fc1", "ff_context.net.2": "mlp.fc2"},
    ),
)

UNUSED_TEXT_LAYERS = ("attn.add_q_proj", "attn.norm_added_q")  # text query layers of the last block

SKIP = "skip"  # name of the pass of skip-layer guidance
SKIP_START, SKIP_STOP = 0.01, 0.2  # diffusers' defaults, as fractions of the denoising steps


class StableDiffusion3(DiffusionModel):
    """Stable Diffusion 3. The network receives the timestep num_train_timesteps * sigma and returns the velocity."""

    family = "sd3"
    pipeline_classes = ("StableDiffusion3Pipeline",)
    required_components = (
        *("transformer", "vae", "scheduler"),
        *("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),  # the third pair (T5) is optional
    )
    conditioning_keys = frozenset({"prompt_embeds", "pooled_prompt_embeds"})
    default_lora_targets = JOINT_ATTENTION_LAYERS
    lora_layer_names = LORA_NAMES
    comfyui_prefix = "transformer"
    block_classes = (JointTransformerBlock,)
    guidance_keys = frozenset({"skip_layers", "skip_scale", "skip_interval"})

    @property
    def unused_parameter_patterns(self) -> tuple[str, ...]:
        last = BLOCK.format(self.config.num_layers - 1)
        return tuple(f"{last}.{layer}.*" for layer in UNUSED_TEXT_LAYERS)

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Conditioning:
        """Return {prompt_embeds: [batch, tokens, channels], pooled_prompt_embeds: [batch, channels]}.

        The tokens are the CLIP tokens followed by the T5 tokens. Without a T5 encoder, zeros replace the T5 tokens.
        """
        texts = {"prompt_2": list(prompts), "prompt_3": list(prompts)}
        embeds, _, pooled, _ = self.call_encode_prompt(prompts, **texts, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        pipeline, clip_length = self.pipeline, self.pipeline.tokenizer_max_length
        if pipeline.tokenizer is None and pipeline.text_encoder is not None:  # on the meta device
            clip_length = pipeline.text_encoder.config.max_position_embeddings
        return {
            # CLIP rows, then T5 rows or zeros
            "prompt_embeds": (clip_length + self.max_sequence_length, self.config.joint_attention_dim),
            "pooled_prompt_embeds": (self.config.pooled_projection_dim,),
        }

    def check_sampling(self, sampling: SamplingRecipe) -> None:
        super().check_sampling(sampling)
        skipped = sampling.guidance.skip_layers
        if skipped and max(skipped) >= self.config.num_layers:
            raise ModelError(
                f"{self.path}: sampling.guidance.skip_layers {skipped}: blocks are 0 to {self.config.num_layers - 1}"
            )

    def skip_interval(self, settings: SamplingRecipe) -> tuple[float, float]:
        """Return the range of noise levels with skip-layer guidance."""
        if settings.guidance.skip_interval is not None:
            return settings.guidance.skip_interval
        shift = self.flow_shift(settings)
        low, high = (shift * q / (1 + (shift - 1) * q) for q in (1 - SKIP_STOP, 1 - SKIP_START))
        return low, high

    def guidance_passes(
        self, settings: SamplingRecipe, expert: int, sigma: float | None = None
    ) -> tuple[GuidancePass, ...]:
        passes = super().guidance_passes(settings, expert, sigma)
        if not passes or not settings.guidance.skip_layers:
            return passes
        if sigma is not None and not is_inside(sigma, *self.skip_interval(settings)):
            return passes
        return (*passes, GuidancePass(SKIP, variant=format_blocks(settings.guidance.skip_layers)))

    def combine_passes(
        self,
        cond: Tensor,
        others: Mapping[str, Tensor],
        latents: Tensor,
        sigma: Tensor,
        settings: SamplingRecipe,
        expert: int,
    ) -> Tensor:
        guided = super().combine_passes(cond, others, latents, sigma, settings, expert)
        if SKIP not in others:
            return guided
        moved = guided + settings.guidance.skip_scale * (cond - others[SKIP])
        for low, high in (settings.guidance.interval, self.skip_interval(settings)):
            moved = choose_rows(sigma, low, high, moved, guided)
        return moved

    def denoise(
        self,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        expert: int | None = None,
        variant: str = "",
    ) -> Tensor:
        """Predict the velocity. variant: the blocks that the network skips, such as `7,8,9`."""
        self.check_denoise(latents, sigma, conditioning, expert)
        skipped = {"skip_layers": parse_blocks(variant)} if variant else {}
        velocity: Tensor = self.denoiser(
            hidden_states=latents.to(self.dtype),
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,  # stays float32
            encoder_hidden_states=conditioning["prompt_embeds"].to(self.dtype),
            pooled_projections=conditioning["pooled_prompt_embeds"].to(self.dtype),
            **skipped,
            return_dict=False,
        )[0]
        return velocity.float()

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return (channels, H / f, W / f) for H x W pixels and VAE scale factor f.

        The size of the network's positional embedding table limits height and width.
        """
        patch = self.pipeline.vae_scale_factor * self.config.patch_size
        size = self.image_latent_size(height, width, num_frames, patch, patch * self.config.pos_embed_max_size)
        return (self.config.in_channels, *size)

    def num_tokens(self, shape: Sequence[int]) -> int:
        return count_patches(shape, self.config.patch_size)

    def schedule_arguments(self, shape: Sequence[int], num_steps: int) -> dict[str, Any]:
        is_dynamic = self.pipeline.scheduler.config.get("use_dynamic_shifting")
        return {"mu": self.shift_parameter(self.num_tokens(shape))} if is_dynamic else {}
