"""The highest MFU that the eager operators of a recipe allow: `python -m benchmarks.gpu roofline RECIPE ...`.

Runs the rollout's and the training's forward and backward passes of a step on the meta device, with the recipe's
adapters, batch sizes and `engine.fused_norms`, and counts FLOPs and bytes of each operator (benchmarks/roofline.py). An
operator takes the longer of its FLOPs and its bytes at the device's rates, which are measured on a GPU. Optimizer,
decoding and rewards are not counted. Weights are not needed: a model folder that does not exist is looked up by its
name in released.py.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.flops import CountedModel, RecipeCost, latent_shape
from benchmarks.forward_counts import TRAINING_PURPOSE, ForwardCount, flops_by_purpose
from benchmarks.gpu import runs
from benchmarks.gpu.machine import matmul_tflops
from benchmarks.roofline import DATASHEET_TFLOPS, H100_TBYTES, H100_TFLOPS, Attention, Costs, Operators
from wfm_ds.engine.adapter_layers import find_adapter_layers
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.flop_counter import copy_to_meta
from wfm_ds.engine.fused_norms import fuse_norms
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.models.base import DiffusionModel
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe

TYPICAL_STEP = 2  # in the first step, some policies have equal weights and need no forward passes


def phase_rooflines(recipe: Recipe, tflops: float, tbytes: float, peak: float) -> list[dict[str, Any]]:
    """Return a row for each phase of an RL step on one GPU: time and MFU that no eager run can exceed.

    tflops, tbytes: rates of large matrix products and copies, in TFLOP/s and TB/s. peak: TFLOP/s that MFU refers to.
    """
    subject = CountedModel.from_recipe(recipe)
    texts = subject.texts(recipe.lora is not None)
    cost = RecipeCost.from_recipe(recipe, subject, 1)  # adds the adapters
    forwards = cost.steps[TYPICAL_STEP - 1]
    work = flops_by_purpose(forwards, cost.flops)
    model = meta_model(subject.model, recipe)
    shape = latent_shape(recipe, model)
    flops, seconds = dict[str, float](), dict[str, float]()
    for purpose, count in forwards.items():
        phase = "rollout" if purpose == "rollout" else "train"
        # As in a run's MFU, without the scores that the backward pass of attention recomputes.
        flops[phase] = flops.get(phase, 0.0) + work[purpose].forward + work[purpose].backward
        for passes, costs in count_passes(model, shape, texts, count, trains=purpose == TRAINING_PURPOSE):
            seconds[phase] = seconds.get(phase, 0.0) + passes * costs.eager_s(tflops * 1e12, tbytes * 1e12)
    return [
        {
            "phase": phase,
            "fused norms": "yes" if recipe.engine.fused_norms else "no",
            "TFLOP": flops[phase] / 1e12,
            "least s, eager": seconds[phase],
            "highest MFU, eager": flops[phase] / seconds[phase] / (peak * 1e12),
        }
        for phase in flops
    ]


def meta_model(model: DiffusionModel, recipe: Recipe) -> DiffusionModel:
    """Return a copy of the model whose denoiser is on the meta device, with the recipe's dtype and fused norms."""
    shadow = copy.copy(model)
    shadow.denoiser = copy_to_meta(model.unwrapped_denoiser).to(DTYPES[recipe.model.dtype])
    if recipe.engine.fused_norms:
        fuse_norms(shadow.denoiser)
    return shadow


def count_passes(
    model: DiffusionModel, shape: tuple[int, ...], texts: Mapping[str, Tensor], count: ForwardCount, *, trains: bool
) -> Iterator[tuple[float, Costs]]:
    """Yield the number of passes at the mean batch size, and the costs of one, with and without adapters.

    trains: include the backward pass.
    """
    batch = round(count.samples / count.calls)
    for samples, adapters in ((count.samples - count.without_adapters, True), (count.without_adapters, False)):
        if samples:
            yield samples / batch, count_pass(model, shape, texts, batch, adapters=adapters, trains=trains)


def count_pass(
    model: DiffusionModel,
    shape: tuple[int, ...],
    texts: Mapping[str, Tensor],
    batch: int,
    *,
    adapters: bool,
    trains: bool,
) -> Costs:
    """Return the costs of one forward pass, and of its backward pass if `trains`."""
    costs = Costs()
    inputs = {
        name: torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device="meta") for name, tensor in texts.items()
    }
    inputs |= {name: torch.empty(batch, *size, device="meta") for name, size in model.input_shapes(shape).items()}
    latents, sigma = torch.empty(batch, *shape, device="meta"), torch.empty(batch, device="meta")
    layers = find_adapter_layers(model.denoiser)
    for layer in layers:
        layer.enable_adapters(adapters)
    try:
        with torch.set_grad_enabled(trains), Operators(costs), Attention(costs):
            velocity = model.denoise(latents, sigma, inputs, 0)
            if trains:
                torch.autograd.backward(velocity.sum())
    finally:
        for layer in layers:
            layer.enable_adapters(True)
    return costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="overrides for every recipe")
    parser.add_argument("--tflops", type=float, help=f"TFLOP/s (default: measured; {H100_TFLOPS:g} on a CPU)")
    parser.add_argument("--tbytes", type=float, help=f"TB/s (default: measured; {H100_TBYTES:g} on a CPU)")


def choose_rate(given: float | None, measure: Callable[[], float], assumed: float) -> tuple[float, str]:
    """Return a rate of the device, and where it comes from."""
    if given is not None:
        return given, "given"
    return (measure(), "measured") if torch.cuda.is_available() else (assumed, "assumed")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = runs.join_world().device
    tflops, source = choose_rate(args.tflops, lambda: matmul_tflops(8192, device), H100_TFLOPS)
    tbytes, tbytes_source = choose_rate(args.tbytes, lambda: timing.copy_gbps() / 1000, H100_TBYTES)
    peak = peak_tflops(device, torch.bfloat16) or DATASHEET_TFLOPS
    rates = {f"TFLOP/s of large products ({source})": tflops, f"TB/s of copies ({tbytes_source})": tbytes}
    for path in args.recipes:
        recipe = recipe_file.load_recipe(path, [f"run.steps={TYPICAL_STEP}", *args.set])
        for row in phase_rooflines(recipe, tflops, tbytes, peak):
            yield {"recipe": path.stem, **row, **rates, "TFLOP/s that are MFU 1": peak}
