"""Preparation of the denoiser for DeepSpeed: weight placement, adapters, sequence parallelism and kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn
from torch.distributed import ProcessGroup

from wfm_ds.distributed.world import World
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.block_compilation import compile_blocks
from wfm_ds.engine.checkpointing import enable_checkpointing
from wfm_ds.engine.fp8_training import train_in_float8
from wfm_ds.engine.fused_norms import fuse_norms
from wfm_ds.engine.policies import Adapters, AdapterTensors, add_adapters, set_trainable
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.seeds import derive_seed

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
    frozen: AbstractSet[str],
    initial_adapter: AdapterTensors | None,
    extra_adapters: Sequence[str],
    frozen_adapters: Mapping[str, AdapterTensors],
    shard_tokens: TokenSharding,
) -> Adapters | None:
    """Prepare a denoiser in place for training. All ranks must call this. Returns the adapters, or None without LoRA.

    config: the config for deepspeed.initialize. names: names of the policy copies that have adapters. extra_adapters:
    names of the extra adapters. For the other arguments and the errors, see `DenoiserEngine.build`.
    """
    dtype = DTYPES[recipe.model.dtype]
    quantise_base(denoiser, block_classes, recipe.model.base_precision, dtype, world.device)
    place_weights(denoiser, config, dtype, world.device)
    adapters: Adapters | None = None
    if recipe.lora is None:
        set_trainable(denoiser, frozen)
        train_in_float8(denoiser, block_classes, recipe.model.fp8_training, dtype, world.device)
    else:
        seed = derive_seed(recipe.run.seed, "lora_init")
        adapters = add_adapters(
            denoiser,
            recipe.lora,
            targets,
            names,
            seed,
            initial_adapter,
            extra=extra_adapters,
            frozen=frozen_adapters,
        )
        for parameter in denoiser.parameters():
            if not hasattr(parameter, "ds_id"):  # not one of the partitioned base weights
                parameter.data = parameter.data.to(dtype)
        logger.info("LoRA of rank %d on %d layers (%s)", recipe.lora.rank, len(adapters.layers), ", ".join(targets))
    enable_checkpointing(denoiser, recipe.model.gradient_checkpointing)
    if world.replica is not None:
        shard_tokens(denoiser, world.replica.group)
    kernel = attention_kernels.choose_kernel(recipe.model.attention, denoiser, dtype, world.device, trains=True)
    if kernel == "flash3" and recipe.engine.compile:
        raise RecipeError("model.attention: flash3 cannot be compiled with gradients: set engine.compile: false")
    attention_kernels.use_kernel(denoiser, kernel, trains=True)
    if recipe.engine.fused_norms:
        fuse_norms(denoiser)
    if recipe.engine.compile:
        compares = recipe.is_rl and recipe.rl.algorithm.compares_log_probs
        compile_blocks(denoiser, block_classes, same_sums=compares)
        logger.info("blocks are compiled at first use")
    if world.device.type != "cpu":  # a CPU has only one attention kernel
        logger.info("attention kernel: %s", kernel)
    return adapters


def place_weights(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Move the weights to their device, or partition them at ZeRO-3.

    All ranks must call this, before adapters are added.

    Nothing is broadcast, so all ranks must have loaded the same weights. config: the config for deepspeed.initialize.
    """
    zero = config["zero_optimization"]
    on_nvme = (zero.get("offload_param") or {}).get("device") == "nvme"  # DeepSpeed sets up NVMe swapping itself
    if zero["stage"] == 3 and not on_nvme:
        partition_weights(denoiser, config, dtype)
        move_buffers(denoiser, device)
    else:
        move_weights(denoiser, dtype, device)


def move_weights(denoiser: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move all weights and buffers to the device. Only weights are cast to `dtype`."""
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(device, dtype)
    move_buffers(denoiser, device)


def move_buffers(denoiser: nn.Module, device: torch.device) -> None:
    for part in denoiser.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def partition_weights(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Keep only this rank's ZeRO-3 shard of every parameter.

    Unlike DeepSpeed's zero.Init(module=...), this broadcasts nothing and only reads the shard's pages of the mapped
    file.
    """
    init = deepspeed.zero.Init(
        config_dict_or_path=dict(config),
        dtype=dtype,
        # If an earlier engine in this process created the process group for hpZ (sharding within a node), reuse it.
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
    )
    parameter: Any
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(dtype)
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        # The partitioned parameter's tensor is empty. DeepSpeed gathers the parameter on the device of this tensor.
        parameter.data = parameter.data.to(init.local_device)
