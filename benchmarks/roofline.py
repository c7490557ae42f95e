"""A roofline of each released denoiser: `python -m benchmarks.roofline [NAME ...] [--tflops 790] [--tbytes 2.9]`.

One forward without gradient on the meta device, operator by operator: FLOPs of matrix products, convolutions and
attention, and the bytes that each operator reads and writes once. An operator takes the longer of its FLOPs at the
device's rate and its bytes at the memory's; their sum is the least time of an eager forward. `products alone` leaves
out every other operator, as if a compiler hid all of them: what fusing could gain at most. Nothing is timed; launches
and kernels below their peak come on top. Attention counts as one operator that keeps its scores on the chip.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.counting import ALLOCATIONS, stored_bytes
from benchmarks.released import RELEASED, Released
from benchmarks.report import table
from wfm_ds.program import run_command

BATCHES = {"sd35m": 9, "sana": 9}  # of the recipes; videos go one by one
H100_TFLOPS, H100_TBYTES = 790.0, 2.9  # what large products and copies reach there; assumed, not measured by us
DATASHEET_TFLOPS = 989.4  # of an H100 SXM in bfloat16: what MFU is a share of (wfm_ds/engine/device_peaks.py)


@dataclass
class Costs:
    """FLOPs and bytes of operators, in the order in which they ran."""

    products: list[tuple[int, int]] = field(default_factory=list)
    attention: list[tuple[int, int]] = field(default_factory=list)
    others: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, operators: Sequence[tuple[int, int]], flops_s: float, bytes_s: float) -> float:
        return sum(max(flops / flops_s, size / bytes_s) for flops, size in operators)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what every operator but attention costs."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or func._schema.name in ALLOCATIONS or func._schema.name == "aten::detach":
            return result
        tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
        size = sum(map(stored_bytes, tensors.values()))
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            self.costs.others.append((0, size))
        else:
            self.costs.products.append((int(count(*args, **(kwargs or {}), out_val=result)), size))
        return result


class Attention(TorchFunctionMode):
    """Stands in for scaled_dot_product_attention, which the meta device would take apart."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = named["query"], named["key"], named["value"]
        made = query.new_empty(*query.shape[:-1], value.shape[-1])
        rows, columns = math.prod(query.shape[:-1]), key.shape[-2]
        flops = 2 * rows * columns * (query.shape[-1] + value.shape[-1])
        self.costs.attention.append((flops, sum(map(stored_bytes, (query, key, value, made)))))
        return made


def counted(known: Released, batch: int) -> tuple[Costs, int, int]:
    """Costs of one forward, tokens of a sample, and bytes of the weights."""
    model, costs = known.load(), Costs()
    shape = model.latent_shape(*known.size)
    texts = {name: tensor.expand(batch, *tensor.shape[1:]) for name, tensor in known.texts(frozen=False).items()}
    texts |= {name: torch.empty(batch, *found, device="meta") for name, found in model.input_shapes(shape).items()}
    latents, sigma = torch.empty(batch, *shape, device="meta"), torch.empty(batch, device="meta")
    with torch.no_grad(), Operators(costs), Attention(costs):
        model.denoise(latents, sigma, texts, 0)
    weights = sum(p.numel() * p.element_size() for p in model.unwrapped_denoiser.parameters())
    return costs, model.num_tokens(shape), weights


def row(name: str, tflops: float, tbytes: float) -> dict[str, Any]:
    known, batch = RELEASED[name], BATCHES.get(name, 1)
    costs, tokens, weights = counted(known, batch)
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
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RELEASED)} (default: all)")
    made.add_argument("--tflops", type=float, default=H100_TFLOPS, help=f"of the device (default: {H100_TFLOPS:g})")
    made.add_argument("--tbytes", type=float, default=H100_TBYTES, help=f"TB/s of its memory ({H100_TBYTES:g})")
    return made


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(table([row(name, args.tflops, args.tbytes) for name in args.names or RELEASED]) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
