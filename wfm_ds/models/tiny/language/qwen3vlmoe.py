"""Tiny Qwen3-VL mixture of experts: four experts, two per token."""

from __future__ import annotations

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from wfm_ds.models.tiny.parts.chat import TinyLanguageModel
from wfm_ds.models.tiny.parts.qwen3 import qwen3_folder

SEED = 23


def build() -> TinyLanguageModel:
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    return qwen3_folder(Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig, SEED, text=experts)
