"""Tiny SANA-WM: five frames of 32x32 pixels along a camera path."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaWMPipeline, SanaWMTransformer3DModel
from transformers import Gemma2ForCausalLM

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.gemma import gemma_encoder, gemma_tokenizer
from wfm_ds.models.tiny.parts.ltx2_vae import CHANNELS, ltx2_vae
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "in_channels": CHANNELS,
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "softmax_every_n": 2,
        "linear_head_dim": 16,
        "chunk_plucker_channels": 6 * 2,
        "chunk_plucker_post_attn_blocks": 2,
        "caption_channels": 32,
        "mlp_ratio": 2.0,
    }
)


def build() -> tuple[SanaWMPipeline, dict[str, Any]]:
    """Return the pipeline and its call arguments. The arguments do not contain the image and the camera."""
    tokenizer = gemma_tokenizer()
    encoder = Gemma2ForCausalLM(gemma_encoder(len(tokenizer), TEXT_SEED).config)
    with temporary_seed(TRANSFORMER_SEED):
        transformer = SanaWMTransformer3DModel(**TRANSFORMER)
        randomize_zero_weights(transformer)
    pipeline = SanaWMPipeline(
        tokenizer=tokenizer,
        text_encoder=redraw_text_weights(encoder, TEXT_SEED).eval(),
        vae=ltx2_vae(VAE_SEED).eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    call = {
        "prompt": "a red circle moving left",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
        "chi_prompt": ["a video of "],  # the default is long and slow to encode
    }
    return pipeline, call


@torch.no_grad()
def randomize_zero_weights(transformer: SanaWMTransformer3DModel) -> None:
    """Randomize weights that are initialized to zero.

    Every block then has an output, and the camera has an effect.
    """
    for name, weight in transformer.named_parameters():
        if ".conv_k" in name or "plucker_embedder" in name or ".t_conv" in name:
            weight.normal_(0, 0.3)
