"""Tiny Wan 2.1 image-to-video: the first frame enters through extra input channels and CLIP embeddings."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.wan_vae import wan_vae
from wfm_ds.models.tiny.wan21 import TRANSFORMER_SEED, VAE_SEED, assemble_pipeline, build_transformer, call_arguments

CLIP_SEED = 21
CLIP_SIDE, CLIP_WIDTH = 16, 16
VALUE_GAIN = 4  # nearly all of the 512 text tokens are padding, which dilutes the attention output
IMAGE_CONFIG = {"in_channels": 12}  # four latents, four frame masks, four image latents


def build() -> tuple[WanImageToVideoPipeline, dict[str, Any]]:
    """Return the pipeline and its call arguments. The arguments do not contain the image."""
    side = {"height": CLIP_SIDE, "width": CLIP_SIDE}
    network = build_transformer(TRANSFORMER_SEED, **IMAGE_CONFIG, image_dim=CLIP_WIDTH, added_kv_proj_dim=32)
    with torch.no_grad():
        for block in network.blocks:
            block.attn2.to_v.weight.mul_(VALUE_GAIN)
    pipeline = assemble_pipeline(
        wan_vae(VAE_SEED),
        WanImageToVideoPipeline,
        transformer=network,
        image_encoder=build_clip(),
        image_processor=CLIPImageProcessor(size={"shortest_edge": CLIP_SIDE}, crop_size=side),
    )
    return pipeline, {**call_arguments(), "max_sequence_length": 512}


def build_clip() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=CLIP_SIDE,
        patch_size=8,
    )
    with temporary_seed(CLIP_SEED):
        return CLIPVisionModel(config).eval()
