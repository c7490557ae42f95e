"""Tiny Wan 2.2 TI2V: one timestep per token, and a VAE of factor 16 that patchifies."""

from __future__ import annotations

from typing import Any

from diffusers import WanPipeline

from wfm_ds.models.tiny.parts.wan_vae import wan_vae
from wfm_ds.models.tiny.wan21 import VAE_SEED, assemble_pipeline, call_arguments


def build() -> tuple[WanPipeline, dict[str, Any]]:
    vae = wan_vae(
        VAE_SEED,
        decoder_base_dim=8,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    return assemble_pipeline(vae, expand_timesteps=True), call_arguments()
