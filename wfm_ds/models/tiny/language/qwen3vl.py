"""Qwen3-VL in miniature: features of the vision tower enter two layers, and the frames of a video have times."""

from __future__ import annotations

from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from wfm_ds.models.base import seeded
from wfm_ds.models.tiny.parts.chat import LanguageFolder, chat_tokenizer
from wfm_ds.models.tiny.parts.qwen import SPECIAL
from wfm_ds.models.tiny.parts.weights import spread_text_weights

SEED = 22
SIZE = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}


def build() -> LanguageFolder:
    """The model in float32, with tied embeddings as the small ones have, and its processors."""
    tokenizer = chat_tokenizer()
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
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
            "tie_word_embeddings": True,
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
        tie_word_embeddings=True,
    )
    with seeded(SEED):
        model = spread_text_weights(Qwen3VLForConditionalGeneration(config), SEED)
    return LanguageFolder(model.eval(), tokenizer, Qwen2VLImageProcessorPil(size=SIZE, patch_size=16))
