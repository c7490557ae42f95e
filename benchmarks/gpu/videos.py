"""One denoiser at its released size: seconds and memory of a forward pass by attention kernel, of a backward pass, and
of decoding: `python -m benchmarks.gpu videos NAME ... [--layers N] [--tiny]`.

Weights and text embeddings are random. Kernels are measured one after another in one process. `difference` is the
relative norm of the difference from the first kernel's output.
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

from benchmarks.forward_counts import count_flops
from benchmarks.gpu import host_counts, runs
from benchmarks.gpu.machine import median_s
from benchmarks.gpu.pipelines import TINY
from benchmarks.gpu.steps import try_measurement
from benchmarks.released import RELEASED
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.checkpointing import enable_checkpointing
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.models import registry, vae
from wfm_ds.models.assets.guardrail import Guardrail
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.tiny import write_tiny_model
from wfm_ds.recipe.shared_defaults import AttentionName, Checkpointing

KERNELS: tuple[AttentionName, ...] = ("native", "cudnn", "flash", "flash3", "sage")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model with the inputs of one sample."""

    model: DiffusionModel
    shape: tuple[int, ...]  # of the latents
    conditioning: Mapping[str, Tensor]

    @classmethod
    def from_released(cls, name: str, device: torch.device, layers: int | None) -> MeasuredModel:
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
    def from_tiny(cls, name: str, device: torch.device) -> MeasuredModel:
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


def forward_measurements(subject: MeasuredModel) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the measurements of a forward pass, by attention kernel."""
    first: list[Tensor] = []
    flops = count_flops(subject.model, subject.shape, subject.conditioning).forward
    return {f"forward, {kernel}": partial(measure_forward, subject, kernel, flops, first) for kernel in KERNELS}


@torch.no_grad()
def measure_forward(subject: MeasuredModel, kernel: AttentionName, flops: int, first: list[Tensor]) -> dict[str, Any]:
    """Measure a forward pass. Raises UserError if the device or denoiser does not support the kernel. first: the output
    of the first kernel."""
    denoiser, device = subject.model.unwrapped_denoiser, subject.model.device
    dtype = next(denoiser.parameters()).dtype
    stock = {layer: layer.processor for _, layer in attention_kernels.attention_layers(denoiser)}
    attention_kernels.use_kernel(
        denoiser, attention_kernels.choose_kernel(kernel, denoiser, dtype, device, trains=False)
    )
    try:
        found, velocity = time_with_memory(subject.forward, device, repeats=3), subject.forward()
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


def measure_backward(subject: MeasuredModel, setting: Checkpointing) -> dict[str, Any]:
    """Measure forward and backward passes of all weights. setting: value of model.gradient_checkpointing."""
    denoiser: Any = subject.model.denoiser
    enable_checkpointing(denoiser, setting)
    denoiser.requires_grad_(True).train()

    def forward_and_backward() -> None:
        torch.autograd.backward(subject.forward().square().mean())

    try:
        return time_with_memory(forward_and_backward, subject.model.device, repeats=2)
    finally:
        denoiser.disable_gradient_checkpointing()
        denoiser.requires_grad_(False).eval()
        for parameter in denoiser.parameters():
            parameter.grad = None


@torch.no_grad()
def measure_decoding(subject: MeasuredModel, dtype: torch.dtype) -> dict[str, Any]:
    decoder: Any = subject.model.pipeline.vae
    decoder.to(dtype)
    latents = torch.randn(1, *subject.shape, device=subject.model.device, dtype=dtype)
    return time_with_memory(lambda: vae.decode_normalized(decoder, latents), subject.model.device, repeats=2)


def time_with_memory(call: Callable[[], object], device: torch.device, repeats: int) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return {"s": median_s(call, repeats), **host_counts.memory_columns(device)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", choices=sorted(RELEASED))
    parser.add_argument("--layers", type=int, help="number of the denoisers' layers (default: as released)")
    parser.add_argument("--tiny", action="store_true", help="tiny pipelines of the same families")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in args.names:
        yield from measure_model(name, args)
        runs.release_memory()


def measure_model(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = runs.join_world().device
    subject = (
        MeasuredModel.from_tiny(name, device) if args.tiny else MeasuredModel.from_released(name, device, args.layers)
    )
    todo = forward_measurements(subject)
    todo |= {
        "forward and backward, checkpointing": partial(measure_backward, subject, True),
        "forward and backward, attention kept": partial(measure_backward, subject, "attention"),
    }
    todo |= {f"decode, {dtype}": partial(measure_decoding, subject, kind) for dtype, kind in DTYPES.items()}
    native_s: float | None = None
    for what, do in todo.items():
        row = {"model": name, "what": what, **try_measurement(do)}
        if what == "forward, native":
            native_s = row.get("s")
        faster = (
            {"times as fast": native_s / row["s"]} if native_s and what.startswith("forward, ") and "s" in row else {}
        )
        yield row | faster
