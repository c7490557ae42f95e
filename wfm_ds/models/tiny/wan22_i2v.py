"""Tiny Wan 2.2 A14B image-to-video: two experts with a boundary at sigma = 0.9, without CLIP."""

from __future__ import annotations

from typing import Any

from diffusers import WanImageToVideoPipeline

from wfm_ds.models.tiny.parts.wan_vae import wan_vae
from wfm_ds.models.tiny.wan21 import TRANSFORMER_SEED, VAE_SEED, assemble_pipeline, build_transformer, call_arguments
from wfm_ds.models.tiny.wan21_i2v import IMAGE_CONFIG
from wfm_ds.models.tiny.wan22 import TRANSFORMER_2_SEED


def build() -> tuple[WanImageToVideoPipeline, dict[str, Any]]:
    """Return the pipeline and its call arguments. The arguments do not contain the image."""
    high_noise, low_noise = (build_transformer(seed, **IMAGE_CONFIG) for seed in (TRANSFORMER_SEED, TRANSFORMER_2_SEED))
    pipeline = assemble_pipeline(
        wan_vae(VAE_SEED),
        WanImageToVideoPipeline,
        transformer=high_noise,
        transformer_2=low_noise,
        boundary_ratio=0.9,
    )
    return pipeline, call_arguments()
