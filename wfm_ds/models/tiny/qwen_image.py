"""Tiny Qwen-Image: 32x32 pixels, a random VAE of factor 8."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.qwen import qwen_encoder, qwen_tokenizer
from wfm_ds.models.tiny.parts.wan_vae import VAE_CONFIG
from wfm_ds.models.tiny.parts.weights import amplify_text

NEWLINE = "\u010a"  # the newline symbol of byte-level BPE
TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1
OUTPUT_GAIN = 3.0  # images of a random decoder are nearly grey; two training steps would not change any 8-bit value
# Words and punctuation of the pipeline's template. They make it exactly the 34 tokens that the pipeline drops.
TEMPLATE_WORDS = (
    *("Describe", "image", "by", "detailing", "color", "shape", "size", "texture", "quantity"),
    *("spatial", "relationships", "objects", "background", ",", ":", NEWLINE),
)

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (8, 4, 4),
    }
)


def build() -> tuple[QwenImagePipeline, dict[str, Any]]:
    tokenizer = qwen_tokenizer(more_words=TEMPLATE_WORDS)
    with temporary_seed(TRANSFORMER_SEED):
        transformer = amplify_text(QwenImageTransformer2DModel(**TRANSFORMER), 4.0)
    with temporary_seed(VAE_SEED):
        vae = AutoencoderKLQwenImage(**VAE_CONFIG)
    vae.decoder.conv_out.weight.data.mul_(OUTPUT_GAIN)
    pipeline = QwenImagePipeline(
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift=1.0,
            shift_terminal=0.02,
        ),
        text_encoder=qwen_encoder(tokenizer, TEXT_SEED).eval(),
        tokenizer=tokenizer,
    )
    call = {
        "prompt": "a red circle on white",
        "negative_prompt": " ",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 64,
    }
    return pipeline, call
