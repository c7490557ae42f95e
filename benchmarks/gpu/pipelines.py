"""Pipelines of released size with random weights: `python -m benchmarks.gpu pipeline NAME FOLDER [--tiny]`.

Complete diffusers folders, created on the device in bfloat16. The denoiser and the VAE have the published dimensions
(released.py). The text encoders have only the published output width and are otherwise minimal. Measurements with these
pipelines depend only on sizes; their images are noise. `--tiny` writes the tiny pipeline of the same family.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from benchmarks.released import RELEASED
from wfm_ds.errors import UserError
from wfm_ds.models.assets.guardrail import NoGuardrail
from wfm_ds.models.assets.loading import hide_progress_bars
from wfm_ds.models.tiny import write_tiny_model
from wfm_ds.models.tiny.tokenizers import clip_tokenizer, gemma_tokenizer, qwen_tokenizer, t5_tokenizer

CLIP_LENGTH = 77
LAYERS = {"wan14b": 10}  # of 40, because all need 28 GB of disk; times and bytes scale with the layers
TINY = {"sd35m": "sd3", "sana": "sana", "wan1.3b": "wan21", "wan14b": "wan21", "cosmos2b": "cosmos25"}
Parts = dict[str, Any]


def clip_encoder(tokenizer: Any, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=width // 64,
            projection_dim=width,
            max_position_embeddings=CLIP_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def sd3_texts() -> Parts:
    tokenizer, t5 = clip_tokenizer(CLIP_LENGTH), t5_tokenizer()
    config = T5Config(vocab_size=len(t5), d_model=4096, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    return {
        **{"tokenizer": tokenizer, "tokenizer_2": tokenizer, "tokenizer_3": t5},
        **{"text_encoder": clip_encoder(tokenizer, 768), "text_encoder_2": clip_encoder(tokenizer, 1280)},
        "text_encoder_3": T5EncoderModel(config),
    }


def sana_texts() -> Parts:
    tokenizer = gemma_tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=2304,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
    )
    return {"tokenizer": tokenizer, "text_encoder": Gemma2Model(config)}


def wan_texts() -> Parts:
    tokenizer = t5_tokenizer()
    config = UMT5Config(vocab_size=len(tokenizer), d_model=4096, d_kv=64, d_ff=64, num_layers=1, num_heads=1)
    return {"tokenizer": tokenizer, "text_encoder": UMT5EncoderModel(config)}


def cosmos_texts() -> Parts:
    """Return the text encoder with all 28 layers, because a text embedding concatenates the outputs of all layers."""
    tokenizer = qwen_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 3584,
            "intermediate_size": 64,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 1,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [0],
        },
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        "safety_checker": NoGuardrail(),
    }


TEXTS: Mapping[str, Callable[[], Parts]] = {
    "sd35m": sd3_texts,
    "sana": sana_texts,
    "wan1.3b": wan_texts,
    "wan14b": wan_texts,
    "cosmos2b": cosmos_texts,
}


def write_pipeline(name: str, out: Path, device: torch.device, **changes: Any) -> int:
    """Write the pipeline into the new folder `out`, and return the number of the denoiser's parameters.

    changes: overrides of the denoiser's configuration.
    """
    known = RELEASED[name]
    torch.manual_seed(0)
    with device:
        parts = {"transformer": known.transformer(**changes), "vae": known.vae(), **TEXTS[name]()}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16).eval()
    pipeline = known.pipeline(**parts, scheduler=known.scheduler())
    if "safety_checker" in parts:
        pipeline.register_modules(safety_checker=None)  # as in the published folders
    with hide_progress_bars():
        pipeline.save_pretrained(out)
    return sum(parameter.numel() for parameter in pipeline.transformer.parameters())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=TEXTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="number of the denoiser's layers (default: as released)")
    parser.add_argument("--tiny", action="store_true", help="the tiny pipeline of the same family")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.folder.exists() and any(args.folder.iterdir()):
        raise UserError(f"{args.folder} is not empty; name a new folder")
    began, row = time.monotonic(), {"pipeline": args.name, "folder": str(args.folder)}
    if args.tiny:
        write_tiny_model(TINY[args.name], args.folder)
    else:
        layers = args.layers or LAYERS.get(args.name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        changes = {} if layers is None else {"num_layers": layers}
        row["parameters"] = write_pipeline(args.name, args.folder, device, **changes)
    gigabytes = sum(file.stat().st_size for file in args.folder.rglob("*") if file.is_file()) / 1e9
    return [row | {"GB": gigabytes, "s": time.monotonic() - began}]
