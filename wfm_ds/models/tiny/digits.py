"""The untrained model of the quickstart: 8x8 pixels and an identity VAE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import AutoencoderTiny, StableDiffusion3Pipeline
from torch import nn

from wfm_ds.models.tiny.sd3 import assemble_pipeline, call_arguments

# 1.3 million parameters: learns 8x8 digits on a laptop within minutes.
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 4,
        "attention_head_dim": 32,
        "num_attention_heads": 3,
        "joint_attention_dim": 64,
        "caption_projection_dim": 96,
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 4,
        "qk_norm": "rms_norm",
    }
)


def build() -> tuple[StableDiffusion3Pipeline, dict[str, Any]]:
    pipeline = assemble_pipeline(TRANSFORMER, identity_vae(), shift=1.0, clip_length=8)
    return pipeline, call_arguments("the digit 7", size=8, num_steps=12, max_sequence_length=8)


def identity_vae() -> AutoencoderTiny:
    """Return a VAE with latents equal to the pixels in [-1, 1]. Encoding and decoding are exact to 1e-4.

    AutoencoderTiny passes (x + 1) / 2 to the encoder for pixels x, and returns 2 y - 1 for the decoder's output y. Its
    decoder starts with a tanh and uses ReLUs. The encoder therefore divides by 20, so that the tanh is almost linear,
    and the decoder multiplies again. Because a ReLU drops negative values, the decoder computes relu(z) - relu(-z).
    """
    vae = AutoencoderTiny(
        encoder_block_out_channels=(6,),
        decoder_block_out_channels=(6,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        latent_channels=3,
        scaling_factor=20.0,
        shift_factor=0.0,
    )
    encoder: list[Any] = [layer for layer in vae.encoder.modules() if isinstance(layer, nn.Conv2d)]
    decoder: list[Any] = [layer for layer in vae.decoder.modules() if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        for i in range(3):
            encoder[0].weight[i, i, 1, 1], encoder[0].bias[i] = 2.0, -1.0
            encoder[1].weight[i, i, 1, 1] = 0.05
            decoder[0].weight[i, i, 1, 1], decoder[0].weight[i + 3, i, 1, 1] = 1.0, -1.0
            decoder[1].weight[i, i, 1, 1], decoder[1].weight[i, i + 3, 1, 1] = 10.0, -10.0
            decoder[1].bias[i] = 0.5
    return vae
