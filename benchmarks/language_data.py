"""A vision-language model with the proportions of a released one, and conversations of different lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_CONVERSATIONS = 192
SIDES = range(64, 225, 32)  # sides of images in pixels: 4 to 49 tokens
WITHOUT_IMAGE = 0.06  # as in LLaVA's instruction mix, 40 of 665 thousand
ANSWER_WORDS = (3.4, 0.8)  # parameters of a log-normal: half of the answers have 30 words or fewer
MAX_WORDS = 150
VOCABULARY = 4096


def write_reasoner(folder: Path, *, small: bool) -> None:
    """Write a random Qwen3-VL. The compute of a text forward pass is distributed as in Qwen3-VL-2B: by its config.json
    the head has 151936 * 2048 weights, a fifth of the layers', and so has the vision tower."""
    import torch
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from wfm_ds.models.base import hide_progress_bars, temporary_seed
    from wfm_ds.models.tiny.parts.chat import TinyLanguageModel, chat_tokenizer
    from wfm_ds.models.tiny.parts.qwen import boundary_token_ids, vision_token_ids

    tokenizer = chat_tokenizer()
    width, depth = (32, 1) if small else (256, 6)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": width // 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [width // 32, width // 32 * 3 // 2, width // 8 - width // 32 - width // 32 * 3 // 2],
                "mrope_interleaved": True,
            },
            **boundary_token_ids(tokenizer),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1 if small else 4,
            "hidden_size": width // 2,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "out_hidden_size": width,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **vision_token_ids(tokenizer),
        tie_word_embeddings=True,
    )
    with temporary_seed(0), hide_progress_bars():
        model = Qwen3VLForConditionalGeneration(config).to(torch.float32)
        processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 32 * 32, "longest_edge": 224 * 224}, patch_size=16)
        TinyLanguageModel(model.eval(), tokenizer, processor).save_pretrained(folder)


def write_conversations(folder: Path) -> None:
    """Write LLaVA annotations of noise images: one to three questions each, answers of log-normal length.
    Deterministic."""
    import numpy as np
    from PIL import Image

    draw, pixels = random.Random(0), np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number in range(NUM_CONVERSATIONS):
        row: dict[str, Any] = {"id": f"{number:03}"}
        if draw.random() >= WITHOUT_IMAGE:
            row["image"] = f"images/{number:03}.png"
            size = (draw.choice(SIDES), draw.choice(SIDES), 3)
            Image.fromarray(pixels.integers(0, 256, size, np.uint8)).save(folder / row["image"])
        rows.append(row | {"conversations": list(_random_turns(draw))})
    (folder / "annotations.json").write_text(json.dumps(rows) + "\n")


def _random_turns(draw: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(draw.randint(1, 3)):
        yield {"from": "human", "value": _random_words(draw, draw.randint(5, 25))}
        yield {
            "from": "gpt",
            "value": _random_words(draw, min(MAX_WORDS, 1 + round(draw.lognormvariate(*ANSWER_WORDS)))),
        }


def _random_words(draw: random.Random, num_words: int) -> str:
    from wfm_ds.models.tiny.parts.vocabulary import WORDS

    words = [word for word in WORDS if len(word) > 1]
    return " ".join(draw.choice(words) for _ in range(num_words))
