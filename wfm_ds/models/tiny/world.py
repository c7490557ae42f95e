"""The untrained model of the action quickstart: a Cosmos3 with action heads and an identity VAE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import Cosmos3OmniPipeline

from wfm_ds.models.tiny.cosmos3 import assemble_pipeline
from wfm_ds.models.tiny.moving import exact_vae

# 0.3 million parameters; 6 video tokens and 8 action tokens. A token has 16 numbers, few relative to the width of 64.
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_scaling": {"mrope_section": [8, 4, 4]},
        "rope_theta": 10.0,
        "unified_3d_mrope_temporal_modality_margin": 100,
        "latent_channel": 4,
        "latent_patch_size": 2,
        "patch_latent_dim": 16,
        "action_gen": True,
        "action_dim": 3,
        "num_embodiment_domains": 1,
    }
)


def build() -> tuple[Cosmos3OmniPipeline, dict[str, Any]]:
    pipeline = assemble_pipeline(TRANSFORMER, exact_vae(), flow_shift=1.0)
    return pipeline, {
        "prompt": '{"caption": "a grey wall"}',
        "height": 8,
        "width": 16,
        "num_frames": 9,
        "num_inference_steps": 8,
        "guidance_scale": 1.0,
    }
