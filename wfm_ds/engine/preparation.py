"""The denoiser on its way into DeepSpeed: placed, adapted, shared among ranks, given its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.distributed.world import World
from wfm_ds.engine import attention
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.compiled import compile_blocks
from wfm_ds.engine.fp8_training import train_in_float8
from wfm_ds.engine.placement import cast_unplaced, place
from wfm_ds.engine.policy import Adapters, add_adapters
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed
from wfm_ds.ulysses.install import install

logger = logging.getLogger(__name__)

Share: TypeAlias = Callable[[nn.Module, ProcessGroup], None]
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
    start: Mapping[str, Tensor] | None = None,
    share: Share = install,
) -> Adapters | None:
    """Collective. Change a denoiser in place: a base in fewer bits, weights to their place, adapters or full training,
    checkpointing, sequence parallelism, attention kernel and compiled blocks, in this order: each finds what came
    before.

    config: what deepspeed.initialize will get. names: of the adapters beside `default`. frozen: parameters that
    full training leaves as they are. start: initial values of the adapters (policy.add_adapters). share: has the ranks
    of a replica share a sample's tokens. Returns the adapters,
    None in full training. Raises as `DenoiserEngine.build`.
    """
    module: Any = denoiser
    dtype = DTYPES[recipe.model.dtype]
    quantise_base(denoiser, block_classes, recipe.model.base_precision, dtype, world.device)
    place(denoiser, config, dtype, world.device)
    adapters: Adapters | None = None
    if recipe.lora is None:
        for name, parameter in denoiser.named_parameters():
            parameter.requires_grad_(name not in frozen)
        train_in_float8(denoiser, block_classes, recipe.model.fp8_training, dtype, world.device)
    else:
        seed = derive_seed(recipe.run.seed, "lora_init")
        adapters = add_adapters(denoiser, recipe.lora, targets, names, seed, start)
        cast_unplaced(denoiser, dtype)
        logger.info("LoRA of rank %d on %d layers (%s)", recipe.lora.rank, len(adapters.layers), ", ".join(targets))
    if recipe.model.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    if world.replica is not None:
        share(denoiser, world.replica.group)
    kernel = attention.choose(recipe.model.attention, denoiser, dtype, world.device, trains=True)
    attention.use(denoiser, kernel)
    if recipe.engine.compile:
        compile_blocks(denoiser, block_classes)
    logger.info("attention by %s%s", kernel, ", blocks compiled at first use" if recipe.engine.compile else "")
    return adapters
