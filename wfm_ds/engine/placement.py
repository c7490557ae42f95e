"""The denoiser's weights, from the pages of their files to where training wants them, one parameter after the other.

models/loading.py maps the files into memory without a copy, so that all ranks of a machine share their pages. At ZeRO-3
each rank copies only its shard out of them; else the whole parameter, in its final dtype on its final device. No rank
ever holds two copies of more than one parameter, on the host or on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn


def place(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Collective, before adapters are added. Move the weights to their device, or cut them at ZeRO-3.

    `config`: what deepspeed.initialize gets. Every rank must have loaded the same weights: nothing is sent.
    """
    zero = config["zero_optimization"]
    on_nvme = (zero.get("offload_param") or {}).get("device") == "nvme"  # DeepSpeed sets its swapping up itself
    if zero["stage"] == 3 and not on_nvme:
        partition(denoiser, config, dtype)
    else:
        move(denoiser, dtype, device)
        return
    move_buffers(denoiser, device)


def move(denoiser: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Move whole weights to their device, in the dtype that they compute in, on ranks and rollout workers alike."""
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(device, dtype)
    move_buffers(denoiser, device)


def move_buffers(denoiser: nn.Module, device: torch.device) -> None:
    """Move the buffers, in the dtypes that they have."""
    for part in denoiser.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))


def partition(denoiser: nn.Module, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Leave this rank its ZeRO-3 shard of every parameter.

    DeepSpeed's own zero.Init(module=...) would bring each parameter to the device and send rank 0's to all; here
    everybody cuts his own, and of the mapped file only the pages of the shard are read.
    """
    init = deepspeed.zero.Init(
        config_dict_or_path=dict(config),
        dtype=dtype,
        # A group that an earlier engine of this process made (hpZ) is used again.
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
    )
    parameter: Any
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.to(dtype)
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        # What is left of it is empty. DeepSpeed gathers a single parameter to where that lies.
        parameter.data = parameter.data.to(init.local_device)


def cast_unplaced(denoiser: nn.Module, dtype: torch.dtype) -> None:
    """Cast the adapters that were added to a partitioned denoiser: DeepSpeed no longer does it beside shards."""
    for parameter in denoiser.parameters():
        if not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)
