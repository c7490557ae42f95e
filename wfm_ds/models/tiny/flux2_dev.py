"""Tiny FLUX.2-dev: the tiny FLUX.2-klein with embedded guidance and a Mistral3 text encoder."""

from __future__ import annotations

import string
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.flux2 import TEXT_WIDTH, TRANSFORMER, TRANSFORMER_SEED, patch_vae
from wfm_ds.models.tiny.parts.mistral import mistral_encoder, mistral_tokenizer
from wfm_ds.models.tiny.parts.weights import amplify_text

TEXT_SEED = 15
TEXT_LAYERS = 31  # the pipeline concatenates the states of layers 10, 20 and 30


def build() -> tuple[Flux2Pipeline, dict[str, Any]]:
    # The pipeline prepends this to every prompt. With one token per word a short sequence still fits the prompt.
    tokenizer = mistral_tokenizer([word.strip(string.punctuation) for word in SYSTEM_MESSAGE.split()])
    with temporary_seed(TRANSFORMER_SEED):
        transformer = amplify_text(Flux2Transformer2DModel(**{**TRANSFORMER, "guidance_embeds": True}), 6.0)
    pipeline = Flux2Pipeline(
        transformer=transformer.eval(),
        vae=patch_vae().eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        text_encoder=mistral_encoder(tokenizer, TEXT_LAYERS, TEXT_WIDTH, TEXT_SEED).eval(),
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
