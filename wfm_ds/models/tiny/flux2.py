"""Tiny FLUX.2-klein (base): 32x32 pixels, 4 latent channels, patches of 2 x 2."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.qwen import boundary_token_ids, qwen_tokenizer
from wfm_ds.models.tiny.parts.weights import amplify_text, redraw_text_weights

TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1
TEXT_LAYERS = 28  # the pipeline concatenates the states of layers 9, 18 and 27
TEXT_WIDTH = 32

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * TEXT_WIDTH,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
)


def build() -> tuple[Flux2KleinPipeline, dict[str, Any]]:
    tokenizer = qwen_tokenizer()
    with temporary_seed(TRANSFORMER_SEED):
        transformer = amplify_text(Flux2Transformer2DModel(**TRANSFORMER), 6.0)
    pipeline = Flux2KleinPipeline(
        transformer=transformer.eval(),
        vae=patch_vae().eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
    )
    call = {
        "prompt": "a red circle on white",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 24,
    }
    return pipeline, call


def patch_vae() -> AutoencoderKLFlux2:
    """Return a VAE of factor 2.

    Its batch norm statistics differ from 0 and 1, so that tests detect missing normalization.
    """
    with temporary_seed(VAE_SEED):
        vae = AutoencoderKLFlux2(
            block_out_channels=(8, 16),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, vae.bn.num_features))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, vae.bn.num_features))
    return vae


def text_encoder(tokenizer: Any) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        **boundary_token_ids(tokenizer),
    )
    with temporary_seed(TEXT_SEED):
        encoder: Qwen3ForCausalLM = redraw_text_weights(Qwen3ForCausalLM(config), TEXT_SEED)
    return encoder
