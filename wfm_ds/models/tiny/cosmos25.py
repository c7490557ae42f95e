"""Tiny Cosmos-Predict2.5: five frames of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diffusers import Cosmos2_5_PredictBasePipeline, CosmosTransformer3DModel, UniPCMultistepScheduler

from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.base import temporary_seed
from wfm_ds.models.cosmos25 import provide_torchvision_resize
from wfm_ds.models.tiny.parts.qwen import qwen_encoder, qwen_tokenizer
from wfm_ds.models.tiny.parts.wan_vae import wan_vae

TEXT_SEED = 14
TRANSFORMER_SEED, VAE_SEED = 0, 1
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "in_channels": 5,  # 4 latent channels and the mask of conditioning frames
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": 32,
        "adaln_lora_dim": 8,
        "max_size": (8, 32, 32),
        "patch_size": (1, 2, 2),
        "rope_scale": (1.0, 3.0, 3.0),
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 64,  # both layers of the text encoder
        "encoder_hidden_states_channels": 32,
    }
)


def build() -> tuple[Cosmos2_5_PredictBasePipeline, dict[str, Any]]:
    """Return the pipeline and its call arguments. The pipeline has no safety checker, like the published ones."""
    tokenizer = qwen_tokenizer()
    with temporary_seed(TRANSFORMER_SEED):
        transformer = CosmosTransformer3DModel(**TRANSFORMER)
    pipeline = Cosmos2_5_PredictBasePipeline(
        text_encoder=qwen_encoder(tokenizer, TEXT_SEED).eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
        vae=wan_vae(VAE_SEED).eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
        ),
        safety_checker=NoGuardrail(),
    )
    pipeline.register_modules(safety_checker=None)
    provide_torchvision_resize()
    call = {
        "prompt": "a red circle on white",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
        "max_sequence_length": 64,
    }
    return pipeline, call
