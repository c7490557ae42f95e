"""Random text encoders, image encoders and vision-language models of width 16 to 64 for the tiny pipelines.

Functions named `..._text` build the tokenizers and text encoders of a pipeline and return {component name: component}.
"""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import transformers

from wfm_ds.models.base import temporary_seed
from wfm_ds.models.tiny.tokenizers import (
    CHAT_TEMPLATE,
    GEMMA_SPECIAL_TOKENS,
    boundary_token_ids,
    clip_tokenizer,
    gemma_tokenizer,
    mistral_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
    vision_token_ids,
)
from wfm_ds.models.tiny.weights import build_encoder

Parts = dict[str, Any]

CLIP_SEEDS, T5_SEED, TEXT_SEED, MISTRAL_SEED, CLIP_IMAGE_SEED = (11, 12), 13, 14, 15, 21
CLIP_IMAGE_SIDE, CLIP_IMAGE_WIDTH = 16, 16  # the width is image_dim of the transformer
# Words and punctuation of Qwen-Image's template. If each of them is one token, the template has 34 tokens. The pipeline
# drops exactly this number of tokens.
QWEN_IMAGE_WORDS = (
    *("Describe", "image", "by", "detailing", "color", "shape", "size", "texture", "quantity"),
    *("spatial", "relationships", "objects", "background", ",", ":", "\u010a"),  # the newline of byte-level BPE
)
# The same for Qwen-Image-Edit. Its template has 64 tokens.
QWEN_EDIT_WORDS = (
    *("Describe", "key", "features", "input", "image", "(", "color", "shape", "size", "texture", "objects", "),"),
    *("then", "explain", "how", "user", "'s", "instruction", "should", "alter", "or", "modify", "Generate", "new"),
    *("that", "meets", "requirements", "while", "maintaining", "consistency", "original", "where", "appropriate"),
    *("background", "Picture", ",", ".", ":", "\u010a"),
)
MAX_EDIT_PIXELS = 9 * 28 * 28  # the text encoder sees at most 9 tokens of an image

# Sizes of a decoder with grouped queries.
DECODER: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
    }
)
GEMMA_DECODER: Mapping[str, Any] = MappingProxyType(
    {
        **DECODER,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        **{f"{name}_token_id": GEMMA_SPECIAL_TOKENS.index(f"<{name}>") for name in ("pad", "eos", "bos")},
    }
)
QWEN_VL_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
QWEN_VL_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


def clip_encoder(tokenizer: Any, seed: int, class_name: str = "CLIPTextModelWithProjection") -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # used by pooling
        pad_token_id=tokenizer.pad_token_id,
    )
    return build_encoder(class_name, config, seed)


def t5_encoder(tokenizer: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return build_encoder("T5EncoderModel", config, T5_SEED)


def gemma_encoder(vocab_size: int, seed: int, class_name: str = "Gemma2Model") -> Any:
    return build_encoder(class_name, transformers.Gemma2Config(vocab_size=vocab_size, **GEMMA_DECODER), seed)


def qwen25vl_encoder(tokenizer: Any, seed: int) -> Any:
    text = {name: value for name, value in DECODER.items() if name != "head_dim"}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "rope_parameters": QWEN_VL_ROPE,
            **boundary_token_ids(tokenizer),
        },
        vision_config=QWEN_VL_VISION | {"fullatt_block_indexes": [0]},
        **vision_token_ids(tokenizer),
    )
    return build_encoder("Qwen2_5_VLForConditionalGeneration", config, seed)


def qwen3vl_model(tokenizer: Any, prefix: str, seed: int, *, text: Mapping[str, Any], **top: Any) -> Any:
    """Return a Qwen3-VL with two text layers of width 32 and two vision layers.

    prefix: common prefix of the model and config class names, Qwen3VL or Qwen3VLMoe.
    text: values to add to the config's text section. top: values to add at the config's top level.
    """
    config = getattr(transformers, f"{prefix}Config")(
        text_config={
            **DECODER,
            "vocab_size": len(tokenizer),
            "rope_parameters": QWEN_VL_ROPE | {"mrope_interleaved": True},
            **boundary_token_ids(tokenizer),
            **text,
        },
        vision_config=QWEN_VL_VISION | {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **vision_token_ids(tokenizer),
        **top,
    )
    return build_encoder(f"{prefix}ForConditionalGeneration", config, seed)


def sd3_text(max_length: int) -> Parts:
    clip, t5 = clip_tokenizer(max_length), t5_tokenizer()
    encoders = [*(clip_encoder(clip, seed) for seed in CLIP_SEEDS), t5_encoder(t5)]
    return number_parts("tokenizer", [clip, clip, t5]) | number_parts("text_encoder", encoders)


def flux_text(max_length: int) -> Parts:
    clip, t5 = clip_tokenizer(max_length), t5_tokenizer()
    encoders = [clip_encoder(clip, CLIP_SEEDS[0], "CLIPTextModel"), t5_encoder(t5)]
    return number_parts("tokenizer", [clip, t5]) | number_parts("text_encoder", encoders)


def number_parts(name: str, parts: Sequence[Any]) -> Parts:
    return {name if i == 0 else f"{name}_{i + 1}": part for i, part in enumerate(parts)}


def wan_text() -> Parts:
    tokenizer = t5_tokenizer()
    config = transformers.UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return {"tokenizer": tokenizer, "text_encoder": build_encoder("UMT5EncoderModel", config, TEXT_SEED)}


def gemma_text(class_name: str = "Gemma2Model") -> Parts:
    tokenizer = gemma_tokenizer()
    return {"tokenizer": tokenizer, "text_encoder": gemma_encoder(len(tokenizer), TEXT_SEED, class_name)}


def gemma3_text() -> Parts:
    """Return the tokenizer, text encoder (Gemma 3 with three layers of states) and connectors of LTX-2."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    tokenizer = gemma_tokenizer()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(
        text_config={**GEMMA_DECODER, "vocab_size": len(tokenizer)},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 8}
    with temporary_seed(TEXT_SEED):
        connectors = LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=3,
            **{f"{stream}_connector_{name}": size for stream in ("video", "audio") for name, size in sizes.items()},
            rope_type="split",
            rope_double_precision=False,
        )
    encoder = build_encoder("Gemma3ForConditionalGeneration", config, TEXT_SEED)
    return {"tokenizer": tokenizer, "text_encoder": encoder, "connectors": connectors.eval()}


def qwen3_text(class_name: str, layers: int, more_words: tuple[str, ...] = ()) -> Parts:
    tokenizer = qwen_tokenizer(more_words=more_words)
    config = transformers.Qwen3Config(
        **{**DECODER, "num_hidden_layers": layers}, vocab_size=len(tokenizer), **boundary_token_ids(tokenizer)
    )
    return {"tokenizer": tokenizer, "text_encoder": build_encoder(class_name, config, TEXT_SEED)}


def qwen25vl_text(more_words: tuple[str, ...] = ()) -> Parts:
    tokenizer = qwen_tokenizer(more_words=more_words)
    return {"tokenizer": tokenizer, "text_encoder": qwen25vl_encoder(tokenizer, TEXT_SEED)}


def qwen_edit_text() -> Parts:
    """Return the tokenizer, text encoder and processor of Qwen-Image-Edit."""
    from wfm_ds.models.qwen_image_edit import ImageTextProcessor

    parts = qwen25vl_text(QWEN_EDIT_WORDS)
    size = {"shortest_edge": 28 * 28, "longest_edge": MAX_EDIT_PIXELS}
    processor = ImageTextProcessor(transformers.Qwen2VLImageProcessorPil(size=size), parts["tokenizer"])
    return {**parts, "processor": processor}


def hunyuan_video15_text() -> Parts:
    """Return the tokenizers and text encoders of HunyuanVideo-1.5: three layers of Qwen2.5-VL, and ByT5.

    The pipeline prepends an instruction of 108 tokens to every prompt and drops the states of these tokens. The
    instruction has this length if each of its words and signs is one token, and if spaces between sentences are single.
    """
    from diffusers import HunyuanVideo15Pipeline

    parameters = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    words = re.findall("[A-Za-z]+", parameters["system_message"].default)
    template = CHAT_TEMPLATE.replace("{{ turn['content'] }}", "{{ turn['content'] | replace('  ', '') }}")
    tokenizer = qwen_tokenizer(more_words=(*words, ",", ".", ":", "\u010a"), template=template)
    config = transformers.Qwen2_5_VLTextConfig(
        **{name: value for name, value in DECODER.items() if name not in ("head_dim", "num_hidden_layers")},
        num_hidden_layers=3,
        vocab_size=len(tokenizer),
        rope_parameters=QWEN_VL_ROPE,
        **boundary_token_ids(tokenizer),
    )
    byt5 = transformers.ByT5Tokenizer()
    encoders = [build_encoder("Qwen2_5_VLTextModel", config, TEXT_SEED), t5_encoder(byt5)]
    return number_parts("tokenizer", [tokenizer, byt5]) | number_parts("text_encoder", encoders)


def cosmos3_text() -> Parts:
    return {"text_tokenizer": qwen_tokenizer(template=CHAT_TEMPLATE)}


def flux2_dev_text() -> Parts:
    """Return the tokenizer and text encoder of FLUX.2-dev, a Mistral3 with 31 layers (the pipeline uses layer 30)."""
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    # The pipeline prepends this message to every prompt. Each word is one token, so a short sequence has room for the
    # prompt.
    tokenizer = mistral_tokenizer([word.strip(string.punctuation) for word in SYSTEM_MESSAGE.split()])
    config = transformers.Mistral3Config(
        text_config={
            **DECODER,
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "num_hidden_layers": 31,
            "sliding_window": None,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    encoder = build_encoder("Mistral3ForConditionalGeneration", config, MISTRAL_SEED)
    return {"tokenizer": tokenizer, "text_encoder": encoder}


def clip_image_parts() -> Parts:
    config = transformers.CLIPVisionConfig(
        hidden_size=CLIP_IMAGE_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=CLIP_IMAGE_SIDE,
        patch_size=8,
    )
    with temporary_seed(CLIP_IMAGE_SEED):
        encoder = transformers.CLIPVisionModel(config).eval()
    crop = {"height": CLIP_IMAGE_SIDE, "width": CLIP_IMAGE_SIDE}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": CLIP_IMAGE_SIDE}, crop_size=crop)
    return {"image_encoder": encoder, "image_processor": processor}
