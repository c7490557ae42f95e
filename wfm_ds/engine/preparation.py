"""Preparation of the denoiser for DeepSpeed: weight placement, adapters, sequence parallelism and kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from wfm_ds.distributed.world import World
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.block_compilation import compile_blocks
from wfm_ds.engine.fp8_training import train_in_float8
from wfm_ds.engine.policies import Adapters, add_adapters, set_trainable
from wfm_ds.engine.weight_placement import cast_adapters, place_weights
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed
from wfm_ds.ulysses.install import install_ulysses

logger = logging.getLogger(__name__)

TokenSharding: TypeAlias = Callable[[nn.Module, ProcessGroup], None]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def prepare_denoiser(
    denoiser: nn.Module,
    recipe: Recipe,
    world: World,
    config: Mapping[str, Any],
    *,
    targets: Sequence[str],
    names: Sequence[str],
    block_classes: Sequence[type[nn.Module]],
    frozen: AbstractSet[str] = frozenset(),
    initial_adapter: Mapping[str, Tensor] | None = None,
    shard_tokens: TokenSharding = install_ulysses,
) -> Adapters | None:
    """Prepare a denoiser in place for training. Returns the adapters; None in full training. Collective.

    The steps must run in this order: low-precision base, weight placement, adapters or full training, gradient
    checkpointing, sequence parallelism, attention kernel, block compilation.

    config: the config for deepspeed.initialize.
    names: names of the adapters in addition to `default`.
    frozen: names of parameters that full training does not train.
    initial_adapter: initial adapter tensors (policies.add_adapters).
    shard_tokens: function that installs sequence parallelism over the ranks of a replica.

    Raises the same errors as `DenoiserEngine.build`.
    """
    module: Any = denoiser
    dtype = DTYPES[recipe.model.dtype]
    quantise_base(denoiser, block_classes, recipe.model.base_precision, dtype, world.device)
    place_weights(denoiser, config, dtype, world.device)
    adapters: Adapters | None = None
    if recipe.lora is None:
        set_trainable(denoiser, frozen)
        train_in_float8(denoiser, block_classes, recipe.model.fp8_training, dtype, world.device)
    else:
        seed = derive_seed(recipe.run.seed, "lora_init")
        adapters = add_adapters(denoiser, recipe.lora, targets, names, seed, initial_adapter)
        cast_adapters(denoiser, dtype)
        logger.info("LoRA of rank %d on %d layers (%s)", recipe.lora.rank, len(adapters.layers), ", ".join(targets))
    if recipe.model.gradient_checkpointing:
        module.enable_gradient_checkpointing()
    if world.replica is not None:
        shard_tokens(denoiser, world.replica.group)
    kernel = attention_kernels.choose_kernel(recipe.model.attention, denoiser, dtype, world.device, trains=True)
    attention_kernels.use_kernel(denoiser, kernel)
    if recipe.engine.compile:
        compile_blocks(denoiser, block_classes)
    logger.info("attention kernel: %s%s", kernel, ", blocks are compiled at first use" if recipe.engine.compile else "")
    return adapters
