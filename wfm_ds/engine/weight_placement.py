"""Placement of the denoiser's weights: moves one parameter at a time from memory-mapped files to the device.

All ranks of a machine share the mapped pages (models/loading.py). At ZeRO-3, each rank copies only its shard of a
parameter. At other stages, it copies the whole parameter. During the move, at most one parameter is in memory twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn


def place_weights(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Move the weights to their device, or partition them at ZeRO-3. Collective; call it before adapters are added.

    config: the config for deepspeed.initialize. Nothing is broadcast, so all ranks must have loaded the same weights.
    """
    zero = config["zero_optimization"]
    on_nvme = (zero.get("offload_param") or {}).get("device") == "nvme"  # DeepSpeed sets up NVMe swapping itself
    if zero["stage"] == 3 and not on_nvme:
        partition_weights(denoiser, config, dtype)
    else:
        move_weights(denoiser, dtype, device)
        return
    move_buffers(denoiser, device)


def move_weights(denoiser: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move all weights to the device, cast to `dtype`, and all buffers in their own dtypes."""
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(device, dtype)
    move_buffers(denoiser, device)


def move_buffers(denoiser: nn.Module, device: torch.device) -> None:
    for part in denoiser.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def partition_weights(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Keep only this rank's ZeRO-3 shard of every parameter.

    Unlike DeepSpeed's zero.Init(module=...), nothing is broadcast from rank 0, and only the shard's pages of the mapped
    file are read.
    """
    init = deepspeed.zero.Init(
        config_dict_or_path=dict(config),
        dtype=dtype,
        # Reuse the group (hpZ) of an earlier engine in this process.
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
    )
    parameter: Any
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(dtype)
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        # The remaining tensor is empty. Its device decides where DeepSpeed gathers a single parameter.
        parameter.data = parameter.data.to(init.local_device)


def cast_adapters(denoiser: nn.Module, dtype: torch.dtype) -> None:
    """Cast the adapters of a partitioned denoiser. (DeepSpeed casts only models that are not partitioned.)"""
    for parameter in denoiser.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
