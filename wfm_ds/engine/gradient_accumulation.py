"""Gradient accumulation in float32 at ZeRO stage 1, whatever the dtype of the weights.

In bfloat16, a sum of equal numbers stops growing after 256 of them. At ZeRO stages 2 and 3, a key in the DeepSpeed JSON
selects float32 (recipe/deepspeed.py). At stage 1 that key would select BF16_Optimizer, which `Shards` does not support.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def accumulate_in_float32(ds: Any) -> None:
    """Make the ZeRO stage 1 optimizer accumulate gradients in float32. Call it before the first backward pass.

    Sets the attributes that the optimizer's constructor sets for float32 accumulation. This can be done afterwards,
    because nothing that the constructor creates depends on them.
    """
    optimizer = ds.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.partition_gradients:
        raise TypeError(f"{type(optimizer).__name__} is not the optimizer of ZeRO stage 1")
    optimizer.gradient_accumulation_dtype = torch.float32
    optimizer.use_separate_grad_accum = optimizer.use_grad_accum_attribute = True
    for group in optimizer.bit16_groups:
        for parameter in group:
            parameter.grad_accum = None
    if not optimizer._grad_acc_hooks:  # the constructor creates them only for some settings of the JSON
        optimizer.create_gradient_handling_hooks()
