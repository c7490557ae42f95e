"""A tiny LTX-2 video VAE: temporal factor 2, spatial factor 8."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLLTX2Video

from wfm_ds.models.base import temporary_seed

CHANNELS = 4


def ltx2_vae(seed: int) -> AutoencoderKLLTX2Video:
    """Return a random VAE. Its latent statistics differ from 0 and 1, so that tests detect missing normalization."""
    with temporary_seed(seed):
        vae = AutoencoderKLLTX2Video(
            latent_channels=CHANNELS,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatiotemporal",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            timestep_conditioning=False,
            patch_size=4,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
            scaling_factor=1.25,
        )
        vae.latents_mean.copy_(0.3 * torch.randn(CHANNELS))
        vae.latents_std.copy_(0.5 + torch.rand(CHANNELS))
    return vae
