"""torch.compile for the denoiser's repeated blocks, one block at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn

from wfm_ds.errors import UserError

MAX_GRAPHS = 256
"""Maximum number of compiled versions of a block class. If more are needed, a forward pass raises an error.

Each combination of block structure, input shapes, policy and gradient mode needs its own version. torch's default of 8
is too low.
"""

# Round half-precision values inside fused operators where eager kernels round them. Otherwise, forward passes with and
# without gradients would round differently in bfloat16, and the probability ratio of two equal policies would not be 1.
COMPILE_OPTIONS = {"emulate_precision_casts": True}


def compile_blocks(denoiser: nn.Module, block_classes: Sequence[type[nn.Module]]) -> int:
    """Compile each block of these classes at its first use, as one graph. Returns the number of blocks.

    Call it after adapters, gradient checkpointing and attention kernels are installed, and before DeepSpeed starts.
    Raises UserError if the denoiser has no block of these classes.
    """
    blocks = [part for part in denoiser.modules() if isinstance(part, tuple(block_classes))]
    if not blocks:
        names = ", ".join(block.__name__ for block in block_classes) or "nothing"
        raise UserError(
            f"engine.compile: the denoiser has no block of the family's block_classes ({names}): "
            "remove the key, or add the classes of its repeated blocks to the family"
        )
    for block in blocks:
        # Not block.compile(): that would also compile the block's hooks, set by DeepSpeed and by sequence parallelism.
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, options=dict(COMPILE_OPTIONS))
        block.forward = lift_recompile_limits(compiled)
    return len(blocks)


def lift_recompile_limits(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function so that each call first raises torch's recompile limits, which are set per thread."""

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config
        if config.recompile_limit < MAX_GRAPHS:
            config.recompile_limit = MAX_GRAPHS
            config.accumulated_recompile_limit = max(4 * MAX_GRAPHS, config.accumulated_recompile_limit)
        return compiled(*args, **kwargs)

    return forward
