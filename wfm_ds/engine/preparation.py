"""The denoiser on its way into DeepSpeed: placed, adapted, shared among ranks, given its kernels and its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import nn

from wfm_ds.distributed.world import World
from wfm_ds.engine import attention
from wfm_ds.engine.compiled import compile_blocks
from wfm_ds.engine.fp8 import quantise_base
from wfm_ds.engine.placement import cast_unplaced, place
from wfm_ds.engine.policy import Adapters, add_adapters
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import OptimizerRecipe
from wfm_ds.seeds import derive_seed
from wfm_ds.ulysses.install import install

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def prepare(
    denoiser: nn.Module,
    recipe: Recipe,
    world: World,
    config: Mapping[str, Any],
    *,
    targets: Sequence[str],
    names: Sequence[str],
    block_classes: Sequence[type[nn.Module]],
    frozen: AbstractSet[str] = frozenset(),
) -> Adapters | None:
    """Collective. Change a denoiser in place: a base in float8, weights to their place, adapters or full training,
    checkpointing, sequence parallelism, attention kernel and compiled blocks, in this order: each finds what came
    before.

    config: what deepspeed.initialize will get. names: of the adapters beside `default`. frozen: parameters
    that full training leaves as they are. Returns the adapters, None in
    full training. Raises as `DenoiserEngine.build`.
    """
    module: Any = denoiser
    dtype = DTYPES[recipe.model.dtype]
    if recipe.model.base_precision == "fp8":
        count = quantise_base(denoiser, block_classes, dtype, world.device)
        how = "" if world.device.type == "cuda" else ", emulated: on a CPU this is for tests"
        logger.info("%.1f million frozen weights in float8%s", count / 1e6, how)
    place(denoiser, config, dtype, world.device)
    adapters: Adapters | None = None
    if recipe.lora is None:
        for name, parameter in denoiser.named_parameters():
            parameter.requires_grad_(name not in frozen)
    else:
        seed = derive_seed(recipe.run.seed, "lora_init")
        adapters = add_adapters(denoiser, recipe.lora, targets, names, seed)
        cast_unplaced(denoiser, dtype)
        logger.info("LoRA of rank %d on %d layers (%s)", recipe.lora.rank, len(adapters.layers), ", ".join(targets))
    if recipe.model.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    if world.replica is not None:
        install(denoiser, world.replica.group)
    kernel = attention.choose(recipe.model.attention, denoiser, dtype, world.device, trains=True)
    attention.use(denoiser, kernel)
    if recipe.engine.compile:
        compile_blocks(denoiser, block_classes)
    logger.info("attention by %s%s", kernel, ", blocks compiled at first use" if recipe.engine.compile else "")
    return adapters


def adamw(denoiser: nn.Module, options: OptimizerRecipe, device: torch.device) -> torch.optim.AdamW:
    """The optimizer of all that trains. On a GPU one kernel updates everything; elsewhere torch chooses."""
    return torch.optim.AdamW(
        [parameter for parameter in denoiser.parameters() if parameter.requires_grad],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=fused(device),
    )


def fused(device: torch.device) -> bool | None:
    """The argument `fused` of torch's AdamW for a denoiser on this device. None on a CPU: fused arithmetic rounds
    otherwise there, and runs would not repeat those before."""
    return True if device.type == "cuda" else None
