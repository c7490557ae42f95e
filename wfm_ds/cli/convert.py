"""`wfm convert`: convert checkpoints to diffusers files, and LoRAs between layouts. Needs no GPU.

Input: a checkpoint of a run (checkpoints/step_N, any number of ranks, any ZeRO stage), a LoRA in the layout of
diffusers, PEFT, kohya or ComfyUI, a native DeepSpeed checkpoint, NVIDIA's checkpoint of Cosmos-Predict2.5 with actions
(*.pt), or a pipeline to extract a LoRA from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from wfm_ds.program import CommandParser

LORA_LAYOUTS = ("diffusers", "comfyui", "kohya", "peft")


def parser() -> CommandParser:
    p = CommandParser(
        description="Convert a checkpoint to a LoRA or a pipeline folder that diffusers loads.",
        epilog="Example: %(prog)s outputs/run/checkpoints/step_400 exported --policy train",
    )
    p.add_argument(
        "checkpoint", help="checkpoints/step_N of a run, a LoRA folder or file, a pipeline, NVIDIA's *.pt, or s3://..."
    )
    p.add_argument("out", type=Path, help="a new folder or an export to replace; for kohya and comfyui a new file")
    p.add_argument("--policy", help="train, ema or old (default: ema if the run had one, else train)")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="dtype of the denoiser in a pipeline (default: the run's)"
    )
    p.add_argument("--merge", action="store_true", help="write a whole pipeline with the LoRA merged")
    p.add_argument("--layout", choices=LORA_LAYOUTS, help="layout of LoRA keys (default: diffusers)")
    p.add_argument(
        "--bake-alpha", action="store_true", help="multiply alpha / rank into B, for readers that ignore alpha"
    )
    p.add_argument(
        "--extract", type=Path, metavar="BASE", help="extract the LoRA that turns BASE into the pipeline CHECKPOINT"
    )
    p.add_argument("--rank", type=int, help="maximum rank of an extracted LoRA")
    p.add_argument("--energy", type=float, help="fraction of each layer's squared change to extract, e.g. .99")
    p.add_argument("--base", type=Path, metavar="PIPELINE", help="the base pipeline, for *.pt or if it was moved")
    p.add_argument(
        "--action-dim",
        type=int,
        metavar="N",
        help="add untrained layers for actions of N numbers to the Cosmos-Predict2.5 pipeline CHECKPOINT",
    )
    p.add_argument("--trust-pickle", action="store_true", help="read a DeepSpeed checkpoint, which can run code")
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.distributed.accelerator import choose_accelerator

    choose_accelerator()  # before the next import, which imports deepspeed
    from wfm_ds.cli.conversion import run_conversion

    run_conversion(args)
