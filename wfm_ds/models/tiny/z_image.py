"""Tiny Z-Image: 32x32 pixels, a random VAE of factor 8."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.qwen import boundary_token_ids, qwen_tokenizer
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1
TEXT_WIDTH = 32

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": TEXT_WIDTH,
        "axes_dims": [8, 4, 4],
        "axes_lens": [256, 32, 32],
    }
)


def build() -> tuple[ZImagePipeline, dict[str, Any]]:
    tokenizer = qwen_tokenizer()
    with temporary_seed(TRANSFORMER_SEED):
        transformer = ZImageTransformer2DModel(**TRANSFORMER)
        randomize_padding(transformer)
    with temporary_seed(VAE_SEED):
        vae = AutoencoderKL(
            latent_channels=4,
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            shift_factor=0.1159,
            scaling_factor=0.3611,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    pipeline = ZImagePipeline(
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        text_encoder=text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
    )
    call = {
        "prompt": "a red circle on white",
        "height": 32,
        "width": 32,
        "num_inference_steps": 2,
        "max_sequence_length": 64,
    }
    return pipeline, call


def randomize_padding(transformer: nn.Module) -> None:
    """Randomize the learned padding tokens. Their initial value, zero, could hide errors in tests."""
    for name, token in transformer.named_parameters():
        if name.endswith("_pad_token"):
            nn.init.normal_(token)


def text_encoder(tokenizer: Any) -> Qwen3Model:
    """Return an encoder with three layers. The pipeline uses the hidden states that enter the last layer."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        **boundary_token_ids(tokenizer),
    )
    with temporary_seed(TEXT_SEED):
        encoder: Qwen3Model = redraw_text_weights(Qwen3Model(config), TEXT_SEED)
    return encoder
