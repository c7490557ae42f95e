"""A roofline of each released denoiser: `python -m benchmarks.roofline [NAME ...] [--tflops 790] [--tbytes 2.9]`.

Runs one forward pass without gradient on the meta device, and counts for each operator: FLOPs of matrix products,
convolutions and attention, and bytes read and written once. The time of an operator is the maximum of its FLOPs at the
device's rate and its bytes at the memory's rate. The sum of these times is a lower bound for an eager forward pass.
`products alone` omits all other operators, as if a compiler fused all of them, and shows the largest possible gain of
fusion. Nothing is timed; launch overhead and slow kernels come on top. Attention counts as one operator that keeps its
scores on the chip.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.counting import ALLOCATIONS, storage_bytes
from benchmarks.released import RELEASED, Released
from benchmarks.report import format_table
from wfm_ds.program import run_command

BATCHES = {"sd35m": 9, "sana": 9}  # batch sizes of the recipes; 1 for videos
H100_TFLOPS, H100_TBYTES = 790.0, 2.9  # rates of large products and copies; assumed, not measured
DATASHEET_TFLOPS = 989.4  # H100 SXM in bfloat16, the reference of MFU (wfm_ds/engine/device_peaks.py)


@dataclass
class Costs:
    """FLOPs and bytes of operators, in the order in which they ran."""

    products: list[tuple[int, int]] = field(default_factory=list)
    attention: list[tuple[int, int]] = field(default_factory=list)
    others: list[tuple[int, int]] = field(default_factory=list)

    def eager_s(self, flops_s: float, bytes_s: float) -> float:
        """Return the least seconds of all operators, one after another."""
        return self.seconds([*self.products, *self.attention, *self.others], flops_s, bytes_s)

    def seconds(self, operators: Sequence[tuple[int, int]], flops_s: float, bytes_s: float) -> float:
        return sum(max(flops / flops_s, size / bytes_s) for flops, size in operators)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the cost of every operator except attention."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or func._schema.name in ALLOCATIONS or func._schema.name == "aten::detach":
            return result
        tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
        size = sum(map(storage_bytes, tensors.values()))
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            self.costs.others.append((0, size))
        else:
            self.costs.products.append((int(count(*args, **(kwargs or {}), out_val=result)), size))
        return result


class _CountedAttention(torch.autograd.Function):
    """Attention that records its cost in both directions instead of computing. The backward pass recomputes the scores:
    five matrix products, where the forward pass has two."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, costs: Costs) -> Tensor:
        made = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows, columns = math.prod(query.shape[:-1]), key.shape[-2]
        flops = 2 * rows * columns * (query.shape[-1] + value.shape[-1])
        size = sum(map(storage_bytes, (query, key, value, made)))
        costs.attention.append((flops, size))
        ctx.save_for_backward(query, key, value)
        ctx.costs, ctx.flops, ctx.size = costs, flops, size
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.costs.attention.append((5 * ctx.flops // 2, 2 * ctx.size))
        return *(torch.empty_like(x) if x.requires_grad else None for x in ctx.saved_tensors), None


class Attention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention, which the meta device would decompose."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        return _CountedAttention.apply(named["query"], named["key"], named["value"], self.costs)  # type: ignore[no-untyped-call]


def count_costs(
    known: Released, batch: int, prepare: Callable[[nn.Module], object] | None = None
) -> tuple[Costs, int, int]:
    """Return the costs of one forward pass, the tokens of a sample, and the bytes of the weights.

    prepare: changes the denoiser before the forward pass.
    """
    model, costs = known.load(), Costs()
    if prepare is not None:
        prepare(model.unwrapped_denoiser)
    shape = model.latent_shape(*known.size)
    texts = {
        name: tensor.expand(batch, *tensor.shape[1:])
        for name, tensor in known.conditioning_shapes(frozen=False).items()
    }
    texts |= {name: torch.empty(batch, *found, device="meta") for name, found in model.input_shapes(shape).items()}
    latents, sigma = torch.empty(batch, *shape, device="meta"), torch.empty(batch, device="meta")
    with torch.no_grad(), Operators(costs), Attention(costs):
        model.denoise(latents, sigma, texts, 0)
    weights = sum(p.numel() * p.element_size() for p in model.unwrapped_denoiser.parameters())
    return costs, model.num_tokens(shape), weights


def roofline_row(name: str, tflops: float, tbytes: float) -> dict[str, Any]:
    known, batch = RELEASED[name], BATCHES.get(name, 1)
    costs, tokens, weights = count_costs(known, batch)
    products = [*costs.products, *costs.attention]
    everything = [*products, *costs.others]
    flops, size = (sum(operator[i] for operator in everything) for i in (0, 1))
    rate, bandwidth = tflops * 1e12, tbytes * 1e12
    eager, fused = costs.seconds(everything, rate, bandwidth), costs.seconds(products, rate, bandwidth)
    height, width, frames = known.size
    return {
        "model": known.title,
        "a forward": f"{batch} x {height} x {width}" + (f" x {frames}" if frames > 1 else ""),
        "tokens a sample": tokens,
        "weights GB": weights / 1e9,
        "TFLOP": flops / 1e12,
        "attention, of the FLOPs": sum(f for f, _ in costs.attention) / flops,
        "GB read and written": size / 1e9,
        "FLOP a byte": flops / size,
        "ms of FLOPs alone": 1e3 * flops / rate,
        "ms, eager": 1e3 * eager,
        "ms, products alone": 1e3 * fused,
        "most that fusing gains": eager / fused,
        "highest MFU, eager": flops / eager / (DATASHEET_TFLOPS * 1e12),
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks.roofline", description="FLOPs and bytes of released denoisers.")
    made.add_argument("names", nargs="*", metavar="NAME", help=f"from {', '.join(RELEASED)} (default: all)")
    made.add_argument(
        "--tflops", type=float, default=H100_TFLOPS, help=f"TFLOP/s of the device (default: {H100_TFLOPS:g})"
    )
    made.add_argument("--tbytes", type=float, default=H100_TBYTES, help=f"TB/s of its memory ({H100_TBYTES:g})")
    return made


def print_rooflines(args: argparse.Namespace) -> None:
    sys.stdout.write(
        format_table([roofline_row(name, args.tflops, args.tbytes) for name in args.names or RELEASED]) + "\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), print_rooflines, argv)


if __name__ == "__main__":
    sys.exit(main())
