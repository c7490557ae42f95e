"""torch.compile for the denoiser's repeated blocks, one block at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import wfm_kernels  # noqa: F401  (registers its operators)
from wfm_ds.errors import UserError

MAX_GRAPHS = 256
"""Maximum number of compiled versions of a block class. If more are needed, a forward pass raises an error.

Each combination of block structure, input shapes, policy and gradient mode needs its own version. torch's default of 8
is too low.
"""


class ShareQuantisedRows(CustomGraphPass):
    """Quantise the shared input of float8 layers once. torch merges equal calls only in graphs with gradient."""

    def __call__(self, graph: fx.Graph) -> None:
        first_calls: dict[Any, fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=torch.ops.wfm_kernels.quantise_rows.default):
            first = first_calls.setdefault((node.args, tuple(node.kwargs.items())), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)

    def uuid(self) -> str:
        """Return the version of this pass, for torch's cache of compiled code."""
        return "wfm_ds.ShareQuantisedRows 1"


SHARE_QUANTISED_ROWS = ShareQuantisedRows()  # one object, because blocks share compiled code only if options are equal


# Round half-precision values inside fused operators where eager kernels round them. Otherwise, forward passes with and
# without gradients would round differently in bfloat16, and the probability ratio of two equal policies would not be 1.
ROUNDING_OPTIONS = {"emulate_precision_casts": True}
# Benchmarks and the analysis of memory accesses must not choose the block sizes of sums: they may choose other sizes
# with gradient than without. Sums then have the same order in both (benchmarks/rehearsal/compiled_code.py).
SUM_OPTIONS = {"deterministic": True, "triton.coalesce_tiling_analysis": False}


def compile_options(*, same_sums: bool) -> dict[str, Any]:
    """Return the options for torch.compile. same_sums: see `compile_blocks`; torch 2.9 and older cannot ensure it."""
    known = torch._inductor.list_options()
    sums = {name: value for name, value in SUM_OPTIONS.items() if same_sums and name in known}
    return {**ROUNDING_OPTIONS, **sums, "post_grad_custom_post_pass": SHARE_QUANTISED_ROWS}


def compile_blocks(denoiser: nn.Module, block_classes: Sequence[type[nn.Module]], *, same_sums: bool = False) -> int:
    """Compile each block of these classes at its first use, as one graph. Returns the number of blocks.

    same_sums: whether sums must have the same order in forward passes with and without gradient, which may be slower.
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
        compiled = torch.compile(
            block.forward, fullgraph=True, dynamic=False, options=compile_options(same_sums=same_sums)
        )
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
