"""Launches and bytes that `engine.fused_norms` saves: `python -m benchmarks.fused_norms [--write]`.

Counts launches and bytes of the denoiser's operators on the meta device at released sizes, with and without fused
norms: of one block of SD3.5 medium, of a forward pass of each family, and of an RL step. The time is that of
benchmarks/roofline.py: an operator takes the longer of its FLOPs and its bytes. Nothing is timed. Optimizer, decoding,
rewards and launch overhead are not counted. torch's own RMSNorm counts as one launch, as on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.flops import CountedModel, RecipeCost, latent_shape
from benchmarks.forward_counts import TRAINING_PURPOSE
from benchmarks.gpu.roofline import TYPICAL_STEP, count_passes, meta_model
from benchmarks.released import RELEASED
from benchmarks.report import print_results
from benchmarks.roofline import BATCHES, H100_TBYTES, H100_TFLOPS, Attention, Costs, Operators, count_costs
from wfm_ds.engine.fused_norms import fuse_norms
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_kernels.norms import rms_norm_operator

RECIPES, NUM_RANKS = ("sd3_nft", "sd3_flow_grpo"), 8
FAMILIES = (
    *("sd35m", "sana", "qwen_image", "z_image", "flux_kontext", "flux2_klein", "flux2_dev"),
    *("cosmos3_nano", "cosmos2b", "hunyuan_video15", "ltx2", "sana_wm"),
    *("sana_video", "wan1.3b", "wan14b", "ti2v5b", "wan_vace"),
)
Counted: TypeAlias = tuple[int, int, float]  # launches, bytes, least seconds


class OneLaunchNorms(TorchFunctionMode):
    """Counts torch's RMSNorm as one launch in each direction. The meta device would decompose it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.rms_norm and func is not torch.rms_norm:
            return func(*args, **(kwargs or {}))
        weight = (kwargs or {}).get("weight", args[2] if len(args) > 2 else None)
        return rms_norm_operator(args[0], weight, 1e-6, False, False)


def summarize_costs(costs: Costs, times: float = 1) -> Counted:
    operators = [*costs.products, *costs.attention, *costs.others]
    seconds = costs.eager_s(H100_TFLOPS * 1e12, H100_TBYTES * 1e12)
    return round(times * len(operators)), round(times * sum(size for _, size in operators)), times * seconds


def compare(subject: str, count: Callable[[bool], Counted]) -> dict[str, Any]:
    """Return one row. count: function that counts with (True) or without fused norms."""
    with OneLaunchNorms():
        before, after = count(False), count(True)
    return {
        "subject": subject,
        "launches": before[0],
        "launches, fused": after[0],
        "GB": before[1] / 1e9,
        "GB, fused": after[1] / 1e9,
        "least ms, eager": 1e3 * before[2],
        "least ms, fused": 1e3 * after[2],
        "at most times as fast": before[2] / after[2],
    }


def block_rows() -> list[dict[str, Any]]:
    """Count one block of SD3.5 medium with two attentions, for 9 samples of 512 x 512 and their texts."""
    known = RELEASED["sd35m"]
    with torch.device("meta"):
        transformer: Any = known.transformer().bfloat16().requires_grad_(False)
        block = transformer.transformer_blocks[0]
        width = block.norm2.normalized_shape[0]
        image, text, time = (
            torch.empty(9, *size, dtype=torch.bfloat16) for size in ((1024, width), (333, width), (width,))
        )

    def count(fused: bool, trains: bool) -> Counted:
        part, costs = copy.deepcopy(block), Costs()
        if fused:
            fuse_norms(part)
        with torch.set_grad_enabled(trains), Operators(costs), Attention(costs):
            outputs = part(image.clone().requires_grad_(trains), text.clone().requires_grad_(trains), time)
            if trains:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        return summarize_costs(costs)

    name = "block of SD3.5 medium with two attentions, 9 x 512 x 512"
    return [
        compare(f"{name}: forward", lambda fused: count(fused, False)),
        compare(f"{name}: forward and backward, frozen weights", lambda fused: count(fused, True)),
    ]


def family_row(name: str) -> dict[str, Any]:
    known, batch = RELEASED[name], BATCHES.get(name, 1)
    size = " x ".join(map(str, (batch, *known.size)))

    def count(fused: bool) -> Counted:
        return summarize_costs(count_costs(known, batch, fuse_norms if fused else None)[0])

    return compare(f"{known.title}, {size}: forward", count)


def step_row(name: str) -> dict[str, Any]:
    """Count the denoiser's passes of an RL step on one rank."""

    def count(fused: bool) -> Counted:
        overrides = [f"run.steps={TYPICAL_STEP}", f"engine.fused_norms={str(fused).lower()}"]
        recipe = recipe_file.load_recipe(Path("recipes") / f"{name}.yaml", overrides)
        subject = CountedModel.from_recipe(recipe)
        texts = subject.texts(recipe.lora is not None)
        forwards = RecipeCost.from_recipe(recipe, subject, NUM_RANKS).steps[TYPICAL_STEP - 1]  # adds the adapters
        model = meta_model(subject.model, recipe)
        shape, counted = latent_shape(recipe, model), []
        for purpose, number in forwards.items():
            passes = count_passes(model, shape, texts, number, trains=purpose == TRAINING_PURPOSE)
            counted += [summarize_costs(costs, times) for times, costs in passes]
        launches, size, seconds = (sum(column) for column in zip(*counted, strict=True))
        return round(launches), round(size), seconds

    return compare(f"{name}.yaml: all passes of a step, each of {NUM_RANKS} ranks", count)


def print_savings(args: argparse.Namespace) -> None:
    rows = [*block_rows(), *map(family_row, FAMILIES), *map(step_row, RECIPES)]
    print_results("fused-norms", rows, write=args.write)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks.fused_norms", description=__doc__.split("\n")[0])
    made.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), print_savings, argv)


if __name__ == "__main__":
    sys.exit(main())
