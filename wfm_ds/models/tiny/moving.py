"""The untrained model of the video quickstart: a Wan transformer for 8 x 8 latents and an identity VAE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.wan21 import TRANSFORMER_SEED, assemble_pipeline

# 0.6 million parameters, 32 tokens per video. A token has 16 numbers, few relative to the width of 96. With 64 numbers
# per token, the model did not learn shapes.
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 3,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 256,
        "num_layers": 4,
        "rope_max_seq_len": 32,
    }
)
VAE_WIDTH = 9
CONSTANT_CHANNEL = VAE_WIDTH - 1  # the channel with a constant value
CONSTANT = 1e4


def build() -> tuple[WanPipeline, dict[str, Any]]:
    with temporary_seed(TRANSFORMER_SEED):
        transformer = WanTransformer3DModel(**TRANSFORMER).eval()
    pipeline = assemble_pipeline(exact_vae(), transformer=transformer, flow_shift=1.0)
    call = {
        "prompt": "a square moving left",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 12,
        "guidance_scale": 1.0,
        "max_sequence_length": 8,
    }
    return pipeline, call


def exact_vae() -> AutoencoderKLWan:
    """Return a Wan VAE with latents equal to the pixels.

    Encoding and decoding are exact to 1e-6 for grey videos in [-1, 1] that are constant on cells of 4 x 4 pixels. A
    latent is the mean of a cell. Its 4 channels are 4 successive frames. The first latent frame has the first frame in
    channel 0 and zeros in the other channels. Hidden channels 0 to 3 carry x and hidden channels 4 to 7 carry -x,
    because silu(x) - silu(-x) = x. Channel 8 is a constant much larger than x, so that the norms before silu only scale
    by a constant.
    """
    vae = AutoencoderKLWan(
        base_dim=VAE_WIDTH,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        set_encoder_weights(vae)
        set_decoder_weights(vae)
    return vae.eval()


def set_encoder_weights(vae: Any) -> None:
    encoder = vae.encoder
    centre = (2, 1, 1)  # the centre tap of a causal 3 x 3 x 3 convolution
    for rgb in range(3):
        encoder.conv_in.weight[0, rgb][centre], encoder.conv_in.weight[4, rgb][centre] = 1 / 3, -1 / 3
    encoder.conv_in.bias[CONSTANT_CHANNEL] = CONSTANT
    first, second = encoder.down_blocks
    for block, slots in ((first, 1), (second, 2)):
        for channel in range(VAE_WIDTH):
            block.resample[1].weight[channel, channel, :2, :2] = 0.25
        block.time_conv.weight[CONSTANT_CHANNEL, CONSTANT_CHANNEL, 2] = 1.0
        for half in (0, 4):
            for slot in range(slots):  # two concatenated frames: channels of the earlier, then of the later frame
                block.time_conv.weight[half + slot, half + slot, 1] = 1.0
                block.time_conv.weight[half + slots + slot, half + slot, 2] = 1.0
    neutralize_norm(encoder.norm_out)
    for channel in range(4):
        encoder.conv_out.weight[channel, channel][centre] = 1.0
        encoder.conv_out.weight[channel, channel + 4][centre] = -1.0
        vae.quant_conv.weight[channel, channel] = 1.0
    vae.quant_conv.bias[4:] = -30.0  # log variance: almost zero variance


def set_decoder_weights(vae: Any) -> None:
    decoder = vae.decoder
    centre = (2, 1, 1)
    first, second, last = decoder.up_blocks
    for channel in range(4):
        vae.post_quant_conv.weight[channel, channel] = 1.0
        decoder.conv_in.weight[channel, channel][centre] = 1.0
        second.resnets[0].conv_shortcut.weight[channel, channel] = 1.0
    for block, slots in ((first, 2), (second, 1)):
        resample = block.upsamplers[0]
        for slot in range(slots):
            resample.time_conv.weight[slot, slot, 2] = 1.0
            resample.time_conv.weight[VAE_WIDTH + slot, slots + slot, 2] = 1.0
        for channel in range(VAE_WIDTH // 2):
            resample.resample[1].weight[channel, channel, 1, 1] = 1.0
    shortcut = last.resnets[0].conv_shortcut
    shortcut.weight[0, 0], shortcut.weight[4, 0], shortcut.bias[CONSTANT_CHANNEL] = 1.0, -1.0, CONSTANT
    neutralize_norm(decoder.norm_out)
    for rgb in range(3):
        decoder.conv_out.weight[rgb, 0][centre], decoder.conv_out.weight[rgb, 4][centre] = 1.0, -1.0


def neutralize_norm(norm: Any) -> None:
    """Set the weight of a norm layer so that it cancels the layer's division. The divisor is about CONSTANT."""
    norm.gamma.fill_(CONSTANT / VAE_WIDTH**0.5)
