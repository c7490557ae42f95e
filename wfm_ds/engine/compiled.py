"""Compilation of the denoiser's repeated blocks by torch.compile, one block at a time.

Blocks of one structure share their compiled code, and hooks of a block stay outside it. What is compiled depends on the
shapes of a forward, on the adapters that compute and on whether a gradient is kept, never on what came before: a run
that continues from a checkpoint computes what it would have computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn

from wfm_ds.errors import UserError

MOST_GRAPHS = 256
"""Versions of one block class that a process may compile: kinds of blocks x shapes x policies, with and without a
gradient. torch stops at 8, and a run has more: then, as beyond this number, a forward raises instead of going on
uncompiled."""

# Values of half precision are rounded where eager kernels round them, also between operators that are fused. Without it
# a forward with a gradient, which keeps other intermediate values than one without, has other results in bfloat16, and
# the ratio of two equal policies is not 1.
OPTIONS = {"emulate_precision_casts": True}


def compile_blocks(denoiser: nn.Module, block_classes: Sequence[type[nn.Module]]) -> int:
    """Compile each block of these classes, when it first runs, as one graph without a break. Returns their number.

    The last change of a denoiser before DeepSpeed: after adapters, checkpointing and attention. Raises UserError for a
    denoiser without such blocks.
    """
    blocks = [part for part in denoiser.modules() if isinstance(part, tuple(block_classes))]
    if not blocks:
        names = ", ".join(block.__name__ for block in block_classes) or "nothing"
        raise UserError(
            f"engine.compile: {type(denoiser).__name__} has no block of the family's block_classes ({names}): remove "
            "the key, or name the classes of its repeated blocks in the family"
        )
    for block in blocks:
        # Not block.compile(): that would compile the hooks of the block too, DeepSpeed's and those of token sharing.
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False, options=dict(OPTIONS))
        block.forward = with_limits(compiled)
    return len(blocks)


def with_limits(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, with torch's limits raised in whatever thread makes it: torch keeps them for each thread, rollout
    workers denoise in several, and autograd recomputes blocks in its own."""

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config
        if config.recompile_limit < MOST_GRAPHS:
            config.recompile_limit = MOST_GRAPHS
            config.accumulated_recompile_limit = max(4 * MOST_GRAPHS, config.accumulated_recompile_limit)
        return compiled(*args, **kwargs)

    return forward
