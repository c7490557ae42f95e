"""Tiny Wan 2.1: videos of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.t5 import t5_tokenizer
from wfm_ds.models.tiny.parts.umt5 import umt5_encoder
from wfm_ds.models.tiny.parts.wan_vae import wan_vae

TRANSFORMER_SEED, VAE_SEED, UMT5_SEED = 0, 1, 14

TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
)


def build() -> tuple[WanPipeline, dict[str, Any]]:
    return assemble_pipeline(wan_vae(VAE_SEED)), call_arguments()


def assemble_pipeline(
    vae: AutoencoderKLWan, pipeline_class: Any = WanPipeline, *, flow_shift: float = 3.0, **options: Any
) -> Any:
    """Return a Wan pipeline with this VAE, in float32 and evaluation mode.

    options: further arguments of the pipeline's constructor. By default, the transformer is tiny and random.
    """
    tokenizer = t5_tokenizer()
    options.setdefault("transformer", build_transformer(TRANSFORMER_SEED))
    text_encoder = umt5_encoder(len(tokenizer), UMT5_SEED)
    return pipeline_class(
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
        ),
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),  # a new one is in training mode (dropout), a loaded one is not
        vae=vae.eval(),
        **options,
    )


def build_transformer(seed: int, **changes: Any) -> WanTransformer3DModel:
    with temporary_seed(seed):
        return WanTransformer3DModel(**{**TRANSFORMER, **changes}).eval()


def call_arguments() -> dict[str, Any]:
    return {
        "prompt": "a red circle moving left",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "max_sequence_length": 16,
    }
