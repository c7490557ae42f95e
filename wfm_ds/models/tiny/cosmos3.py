"""Tiny Cosmos3: five frames of 32x32 pixels, with action heads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler

from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.chat import CHAT_TEMPLATE
from wfm_ds.models.tiny.parts.qwen import qwen_tokenizer
from wfm_ds.models.tiny.parts.wan_vae import wan_vae

TRANSFORMER_SEED, VAE_SEED = 0, 1
TRANSFORMER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # allows two sequence-parallel ranks
        "head_dim": 16,
        "rope_scaling": {"mrope_section": [4, 2, 2]},
        "rope_theta": 1e4,
        "unified_3d_mrope_temporal_modality_margin": 100,
        "latent_channel": 4,
        "latent_patch_size": 2,
        "patch_latent_dim": 16,
        "action_gen": True,
        "action_dim": 16,
        "num_embodiment_domains": 5,
    }
)


def build() -> tuple[Cosmos3OmniPipeline, dict[str, Any]]:
    call = {
        "prompt": "a red circle on white",
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 2,
    }
    return assemble_pipeline(TRANSFORMER, wan_vae(VAE_SEED), flow_shift=5.0), call


def assemble_pipeline(
    transformer: Mapping[str, Any], vae: AutoencoderKLWan, *, flow_shift: float
) -> Cosmos3OmniPipeline:
    """Return a pipeline with this transformer config. The pipeline has no safety checker, like the published ones."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    with temporary_seed(TRANSFORMER_SEED):
        network = Cosmos3OmniTransformer(**transformer, vocab_size=len(tokenizer))
        perturb_vectors(network)
    pipeline = Cosmos3OmniPipeline(
        transformer=network.eval(),
        text_tokenizer=tokenizer,
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
        ),
        safety_checker=NoGuardrail(),
    )
    pipeline.register_modules(safety_checker=None)
    return pipeline


@torch.no_grad()
def perturb_vectors(transformer: Cosmos3OmniTransformer) -> None:
    """Add noise to vectors such as norm weights. Their initial values, zeros and ones, could hide errors in tests."""
    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.add_(0.2 * torch.randn_like(parameter))
