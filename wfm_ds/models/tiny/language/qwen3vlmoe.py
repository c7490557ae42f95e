"""Qwen3-VL with a mixture of experts in miniature: four of them, two for each token."""

from __future__ import annotations

from transformers import Qwen2VLImageProcessorPil, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from wfm_ds.models.base import seeded
from wfm_ds.models.tiny.parts.chat import LanguageFolder, chat_tokenizer
from wfm_ds.models.tiny.parts.qwen import SPECIAL
from wfm_ds.models.tiny.parts.weights import spread_text_weights

SEED = 23
SIZE = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}


def build() -> LanguageFolder:
    """The model in float32 and its processors."""
    tokenizer = chat_tokenizer()
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with seeded(SEED):
        model = spread_text_weights(Qwen3VLMoeForConditionalGeneration(config), SEED)
    return LanguageFolder(model.eval(), tokenizer, Qwen2VLImageProcessorPil(size=SIZE, patch_size=16))
