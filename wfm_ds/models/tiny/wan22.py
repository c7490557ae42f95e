"""Tiny Wan 2.2 A14B: two experts with a boundary at sigma = 0.875."""

from __future__ import annotations

from typing import Any

from diffusers import WanPipeline

from wfm_ds.models.tiny.parts.wan_vae import wan_vae
from wfm_ds.models.tiny.wan21 import VAE_SEED, assemble_pipeline, build_transformer, call_arguments

TRANSFORMER_2_SEED = 5


def build() -> tuple[WanPipeline, dict[str, Any]]:
    low_noise = build_transformer(TRANSFORMER_2_SEED)
    return assemble_pipeline(wan_vae(VAE_SEED), transformer_2=low_noise, boundary_ratio=0.875), call_arguments()
