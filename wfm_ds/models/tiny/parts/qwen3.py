"""Shared code of the tiny Qwen3-VL models, which have a dense decoder or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel, Qwen2VLImageProcessorPil

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.parts.chat import TinyLanguageModel, chat_tokenizer
from wfm_ds.models.tiny.parts.qwen import boundary_token_ids, vision_token_ids
from wfm_ds.models.tiny.parts.weights import redraw_text_weights

SIZE = {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}


def qwen3_folder(
    network: Callable[[Any], PreTrainedModel],
    config: Callable[..., Any],
    seed: int,
    *,
    text: Mapping[str, Any],
    **top: Any,
) -> TinyLanguageModel:
    """Return a float32 model and its processors, with two text layers of width 32 and two vision layers.

    network, config: classes of transformers. text: additional values for the text section of the config. top:
    additional values for the top level of the config.
    """
    tokenizer = chat_tokenizer()
    model_config = config(
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
            **boundary_token_ids(tokenizer),
            **text,
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
        **vision_token_ids(tokenizer),
        **top,
    )
    with temporary_seed(seed):
        model = redraw_text_weights(network(model_config), seed)
    return TinyLanguageModel(model.eval(), tokenizer, Qwen2VLImageProcessorPil(size=SIZE, patch_size=16))
