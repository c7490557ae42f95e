"""The denoisers' matrix products in bfloat16 and in float8 with one scale per row: the speed of float8 and its error.

Without quantization: the product alone. With quantization: activations are quantized in each call, as in training;
weights are quantized in advance. A CPU has no float8 product and computes with the rounded values, for rehearsals.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import runs
from benchmarks.gpu.machine import median_s

ROWS = (12213, 24426, 32760, 84480)  # tokens: SD3.5 at 512 pixels in batches of 9 and 18, Wan 480p, Cosmos 704p
LAYERS = {
    "sd35m attention": (1536, 1536),
    "sd35m mlp": (1536, 6144),
    "wan1.3b mlp": (1536, 8960),
    "cosmos2b mlp": (2048, 8192),
    "wan14b mlp": (5120, 13824),
}
LARGEST = 448.0  # largest float8_e4m3fn


def quantise_rows(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 rows, and the factors [rows, 1] that restore their scale."""
    scale = value.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (value.float() / scale).to(torch.float8_e4m3fn), scale


def float8_matmul(a: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], *, fast: bool = False) -> Tensor:
    """Return a @ weight.T in bfloat16, accumulated in float32 or, if `fast`, with 14 bits."""
    (a8, a_scale), (w8, w_scale) = a, weight
    if a8.device.type != "cuda":
        return ((a8.float() * a_scale) @ (w8.float() * w_scale).T).bfloat16()
    found: Tensor = torch._scaled_mm(
        a8, w8.T, scale_a=a_scale, scale_b=w_scale.T, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return found


def measure_matmul(name: str, rows: int, inner: int, outer: int, device: torch.device) -> dict[str, Any]:
    a = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) / inner**0.5
    a_q, w_q = quantise_rows(a), quantise_rows(weight)
    exact = a.float() @ weight.float().T
    seconds = {
        "bf16": median_s(lambda: a @ weight.T),
        "fp8": median_s(lambda: float8_matmul(a_q, w_q)),
        "fp8 fast": median_s(lambda: float8_matmul(a_q, w_q, fast=True)),
        "fp8 with quantisation": median_s(lambda: float8_matmul(quantise_rows(a), w_q)),
    }
    flops = 2 * rows * inner * outer
    found: dict[str, Any] = {"layer": name, "M": rows, "K": inner, "N": outer}
    found |= {f"{way} TFLOP/s": flops / call_s / 1e12 for way, call_s in seconds.items()}
    found["times as fast, with quantisation"] = seconds["bf16"] / seconds["fp8 with quantisation"]
    products = {"bf16": a @ weight.T, "fp8": float8_matmul(a_q, w_q), "fp8 fast": float8_matmul(a_q, w_q, fast=True)}
    for way, value in products.items():
        found[f"{way} relative error"] = float((value.float() - exact).norm() / exact.norm())
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=int, default=1, help="divide all sizes by this (for a rehearsal)")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = runs.join_world().device
    for name, (inner, outer) in LAYERS.items():
        for rows in ROWS:
            yield measure_matmul(name, -(-rows // args.scale), inner // args.scale, outer // args.scale, device)
