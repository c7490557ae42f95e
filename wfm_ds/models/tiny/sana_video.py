"""Tiny SANA-Video: 5 frames of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import SanaVideoPipeline, SanaVideoTransformer3DModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.wan_vae import wan_vae
from wfm_ds.models.tiny.sana import call_arguments, flow_scheduler, text_parts

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
        "sample_size": 30,
        "patch_size": (1, 2, 2),
        "mlp_ratio": 2.0,
        "rope_max_seq_len": 32,
    }
)


def build() -> tuple[SanaVideoPipeline, dict[str, Any]]:
    with temporary_seed(TRANSFORMER_SEED):
        transformer = SanaVideoTransformer3DModel(**TRANSFORMER)
    pipeline = SanaVideoPipeline(
        vae=wan_vae(VAE_SEED).eval(), transformer=transformer.eval(), scheduler=flow_scheduler(), **text_parts()
    )
    return pipeline, {**call_arguments("a red circle moving left"), "frames": 5}
