"""One denoiser at its own size: seconds and memory of a forward by attention kernel, of a backward, and of decoding.

`python -m benchmarks.gpu videos NAME ... [--layers N] [--tiny]`. Random weights; text is random numbers of the right
shape. Each kernel takes its turn in one process; `difference` is of its output from the first kernel's, by norm.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import counted, runs
from benchmarks.gpu.machine import median_s
from benchmarks.gpu.pipelines import TINY
from benchmarks.gpu.steps import tried
from benchmarks.released import RELEASED
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.models import registry, vae
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.guardrail import Guardrail
from wfm_ds.models.tiny import write_tiny_model
from wfm_ds.recipe.shared_defaults import AttentionName
from wfm_ds.training.forward_flops import count_flops

KERNELS: tuple[AttentionName, ...] = ("native", "cudnn", "flash", "flash3", "sage")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with the inputs of one sample."""

    model: DiffusionModel
    shape: tuple[int, ...]  # of its latents
    conditioning: Mapping[str, Tensor]

    @classmethod
    def released(cls, name: str, device: torch.device, layers: int | None) -> Subject:
        known = RELEASED[name]
        model = known.load(device, **({} if layers is None else {"num_layers": layers}))
        shapes = {**known.conditioning, **model.input_shapes(model.latent_shape(*known.size))}
        texts = {
            key: torch.ones(1, *shape, device=device, dtype=torch.int64)
            if key.endswith("mask")
            else torch.randn(1, *shape, device=device, dtype=torch.bfloat16)
            for key, shape in shapes.items()
        }
        return cls(model, model.latent_shape(*known.size), texts)

    @classmethod
    def tiny(cls, name: str, device: torch.device) -> Subject:
        with tempfile.TemporaryDirectory(prefix="wfm-tiny-") as temporary:
            folder = Path(temporary) / "pipeline"
            write_tiny_model(TINY[name], folder)
            guardrail: Guardrail = "off" if name == "cosmos2b" else "stock"
            model = registry.load_model(folder, dtype=torch.float32, device=device, guardrail=guardrail)
            model.denoiser.to(device)
            conditioning = model.encode_text(["a red circle"])
        return cls(model, model.latent_shape(32, 32, 5 if model.is_video else 1), conditioning)

    def forward(self) -> Tensor:
        device = self.model.device
        latents = torch.randn(1, *self.shape, generator=torch.Generator(device).manual_seed(0), device=device)
        return self.model.denoise(latents, torch.full((1,), 0.5, device=device), dict(self.conditioning), 0)


def forwards(subject: Subject) -> dict[str, Callable[[], dict[str, Any]]]:
    """Measurements of a forward by each attention kernel."""
    first: list[Tensor] = []
    flops = count_flops(subject.model, subject.shape, subject.conditioning).forward
    return {f"forward, {kernel}": partial(forward, subject, kernel, flops, first) for kernel in KERNELS}


@torch.no_grad()
def forward(subject: Subject, kernel: AttentionName, flops: int, first: list[Tensor]) -> dict[str, Any]:
    """Raises UserError for a kernel that this device or denoiser does not have. `first`: what the first one gave."""
    denoiser, device = subject.model.unwrapped_denoiser, subject.model.device
    dtype = next(denoiser.parameters()).dtype
    stock = {layer: layer.processor for _, layer in attention_kernels.attention_layers(denoiser)}
    attention_kernels.use_kernel(
        denoiser, attention_kernels.choose_kernel(kernel, denoiser, dtype, device, trains=False)
    )
    try:
        found, velocity = timed(subject.forward, device, repeats=3), subject.forward()
    finally:
        for layer, processor in stock.items():
            layer.set_processor(processor)
            if hasattr(processor, "_attention_backend"):
                processor._attention_backend = None
    first[:] = first or [velocity]
    found["TFLOP/s"] = flops / found["s"] / 1e12
    peak = peak_tflops(device, torch.bfloat16)
    found |= {} if peak is None else {"MFU": found["TFLOP/s"] / peak}
    return found | {"difference": float((velocity - first[0]).norm() / first[0].norm())}


def backward(subject: Subject) -> dict[str, Any]:
    """Forward and backward of all weights with gradient checkpointing."""
    denoiser: Any = subject.model.denoiser
    denoiser.enable_gradient_checkpointing()
    denoiser.requires_grad_(True).train()

    def both() -> None:
        torch.autograd.backward(subject.forward().square().mean())

    try:
        return timed(both, subject.model.device, repeats=2)
    finally:
        denoiser.disable_gradient_checkpointing()
        denoiser.requires_grad_(False).eval()
        for parameter in denoiser.parameters():
            parameter.grad = None


@torch.no_grad()
def decoding(subject: Subject, dtype: torch.dtype) -> dict[str, Any]:
    decoder: Any = subject.model.pipeline.vae
    decoder.to(dtype)
    latents = torch.randn(1, *subject.shape, device=subject.model.device, dtype=dtype)
    return timed(lambda: vae.decode_normalized(decoder, latents), subject.model.device, repeats=2)


def timed(call: Callable[[], object], device: torch.device, repeats: int) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return {"s": median_s(call, repeats), **counted.memory_columns(device)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", choices=sorted(RELEASED))
    parser.add_argument("--layers", type=int, help="of the denoisers, instead of the released number")
    parser.add_argument("--tiny", action="store_true", help="tiny pipelines of the same families")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.names:
        yield from measured(name, args)
        runs.release()


def measured(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = runs.world().device
    subject = Subject.tiny(name, device) if args.tiny else Subject.released(name, device, args.layers)
    todo = forwards(subject) | {"forward and backward, checkpointing": partial(backward, subject)}
    todo |= {f"decode, {dtype}": partial(decoding, subject, kind) for dtype, kind in DTYPES.items()}
    native_s: float | None = None
    for what, do in todo.items():
        row = {"model": name, "what": what, **tried(do)}
        if what == "forward, native":
            native_s = row.get("s")
        faster = (
            {"times as fast": native_s / row["s"]} if native_s and what.startswith("forward, ") and "s" in row else {}
        )
        yield row | faster
