"""Placement of the denoiser's weights: moves one parameter at a time from memory-mapped files to the training device.

models/loading.py maps the files into memory without a copy, so all ranks of a machine share the pages. At ZeRO-3 each
rank copies only its shard; otherwise it copies the whole parameter, in its final dtype to its final device. No rank
ever holds two copies of more than one parameter, on the host or on the device.
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

    config: the config for deepspeed.initialize. Every rank must have loaded the same weights, because nothing is
    broadcast.
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
    """Move full weights to the device and cast them to `dtype`. Used by trainer ranks and rollout workers."""
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(device, dtype)
    move_buffers(denoiser, device)


def move_buffers(denoiser: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device without changing their dtypes."""
    for part in denoiser.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def partition_weights(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Keep only this rank's ZeRO-3 shard of every parameter.

    DeepSpeed's own zero.Init(module=...) would move each parameter to the device and broadcast it from rank 0. Here
    every rank takes its own shard, and only the shard's pages of the mapped file are read.
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
    """Cast the adapters that were added to a partitioned denoiser.

    DeepSpeed casts parameters itself only for models that are not partitioned yet.
    """
    for parameter in denoiser.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
