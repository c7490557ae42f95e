"""Tiny SANA: 32x32 pixels, a random deep-compression VAE of factor 4."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.gemma import gemma_encoder, gemma_tokenizer

TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "sample_size": 8,
        "patch_size": 1,
        "mlp_ratio": 2.0,
    }
)


def build() -> tuple[SanaPipeline, dict[str, Any]]:
    blocks = ("ResBlock", "ResBlock", "EfficientViTBlock")
    with temporary_seed(VAE_SEED):
        vae = AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8, 16, 16),
            decoder_block_out_channels=(8, 16, 16),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), (5,)),
            decoder_qkv_multiscales=((), (), (5,)),
            upsample_block_type="interpolate",
            downsample_block_type="stride_conv",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )
    with temporary_seed(TRANSFORMER_SEED):
        transformer = SanaTransformer2DModel(**TRANSFORMER)
    pipeline = SanaPipeline(vae=vae.eval(), transformer=transformer.eval(), scheduler=flow_scheduler(), **text_parts())
    return pipeline, call_arguments("a red circle on white")


def text_parts() -> dict[str, Any]:
    """Return {component name: component} with the tokenizer and the text encoder."""
    tokenizer = gemma_tokenizer()
    return {"tokenizer": tokenizer, "text_encoder": gemma_encoder(len(tokenizer), TEXT_SEED).eval()}


def flow_scheduler() -> DPMSolverMultistepScheduler:
    """Return the scheduler of the released models: a second-order flow solver with integer timesteps."""
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
    )


def call_arguments(prompt: str) -> dict[str, Any]:
    """Return call arguments that disable the default instruction, because it is long and slow to encode."""
    return {
        "prompt": prompt,
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
        "complex_human_instruction": None,
        "use_resolution_binning": False,
    }
