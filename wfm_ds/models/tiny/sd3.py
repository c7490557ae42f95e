"""Tiny Stable Diffusion 3.5: 32x32 pixels, a random VAE of factor 2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.clip import clip_encoder, clip_tokenizer
from wfm_ds.models.tiny.parts.t5 import t5_encoder, t5_tokenizer

CLIP_SEEDS, T5_SEED = (11, 12), 13  # text encoders
TRANSFORMER_SEED, VAE_SEED = 0, 1

# One block has dual attention; queries and keys have RMS norms.
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 64,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 32,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    }
)


def build() -> tuple[StableDiffusion3Pipeline, dict[str, Any]]:
    with temporary_seed(VAE_SEED):
        vae = AutoencoderKL(
            latent_channels=4,
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5305,
            force_upcast=False,
        )
    pipeline = assemble_pipeline(TRANSFORMER, vae, shift=3.0, clip_length=16)
    return pipeline, call_arguments("a red circle on white", size=32, num_steps=2, max_sequence_length=16)


def call_arguments(prompt: str, *, size: int, num_steps: int, max_sequence_length: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "height": size,
        "width": size,
        "num_inference_steps": num_steps,
        "max_sequence_length": max_sequence_length,
    }


def assemble_pipeline(
    transformer_config: Mapping[str, Any], vae: nn.Module, *, shift: float, clip_length: int
) -> StableDiffusion3Pipeline:
    """Return a Stable Diffusion 3 pipeline with this VAE, in float32 and evaluation mode."""
    clip = clip_tokenizer(clip_length)
    t5 = t5_tokenizer()
    with temporary_seed(TRANSFORMER_SEED):
        transformer = SD3Transformer2DModel(**transformer_config)
    parts = {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": clip_encoder(clip, clip_length, CLIP_SEEDS[0]),
        "text_encoder_2": clip_encoder(clip, clip_length, CLIP_SEEDS[1]),
        "text_encoder_3": t5_encoder(len(t5), T5_SEED),
    }
    for part in parts.values():
        part.eval()  # a new T5 is in training mode (dropout), a loaded one is not
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        tokenizer=clip,
        tokenizer_2=clip,
        tokenizer_3=t5,
        **parts,
    )
