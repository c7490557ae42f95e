"""The sum of the gradients of an optimizer step's micro-steps: in float32, whatever dtype the weights have.

At ZeRO stages 2 and 3 a key of DeepSpeed's does it (recipe/deepspeed.py writes it). At stage 1 that key would select
BF16_Optimizer, whose masters lie elsewhere than the policies look for them, and without the key gradients are summed in
the weights' dtype: in bfloat16 a sum of 512 equal numbers stops growing after 256 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def accumulate_in_float32(ds: Any) -> None:
    """Make the optimizer of ZeRO stage 1 sum gradients in float32; call it before the first backward.

    These are the attributes that the optimizer's own constructor sets when it is given float32 for its sums, and
    nothing that it built before reads them.
    """
    optimizer = ds.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.partition_gradients:
        raise TypeError(f"{type(optimizer).__name__} is not the optimizer of ZeRO stage 1")
    optimizer.gradient_accumulation_dtype = torch.float32
    optimizer.use_separate_grad_accum = optimizer.use_grad_accum_attribute = True
    for group in optimizer.bit16_groups:
        for parameter in group:
            parameter.grad_accum = None
    if not optimizer._grad_acc_hooks:  # they are made for some settings of the JSON only
        optimizer.create_gradient_handling_hooks()
