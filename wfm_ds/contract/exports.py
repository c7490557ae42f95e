"""Checks of exports: diffusers generates the same as the trained model, and exported adapters can be loaded again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor

from wfm_ds.checkpoint.adapter import load_adapter, load_part
from wfm_ds.checkpoint.export import LORA_FILES, export
from wfm_ds.checkpoint.target import ExportTarget
from wfm_ds.contract.case import stock
from wfm_ds.contract.denoiser import add_adapter
from wfm_ds.contract.subject import Subject, require, require_close

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel

MATTERS = 1e-2  # minimum change of the latents by training, so that the comparison is meaningful


@dataclass
class Source:
    """The engine methods that an export uses, for a denoiser in one process."""

    model: DiffusionModel
    lora: bool

    def lora_config(self) -> Any:
        module: Any = self.model.denoiser
        return module.peft_config["default"] if self.lora else None

    def named_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        module = self.model.denoiser
        yield from (get_peft_model_state_dict(module) if self.lora else module.state_dict()).items()


def lora_export(subject: Subject) -> None:
    """diffusers generates the same latents from an exported LoRA, and our own loading is bit-identical."""
    model = subject.fresh()
    before = subject.sampled(model)
    model.freeze_all_but(model.default_lora_targets)
    add_adapter(model, b_std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        out = export_to(Path(folder) / "out", model, lora=True)
        pipeline = stock(model.path, subject.case)
        for part in model.denoiser_parts:
            load_part(pipeline, part, out / LORA_FILES[part])
        active = pipeline.transformer.active_adapters()
        require(active == ["default"], f"diffusers has adapters {active} after loading one")
        _same_pictures(subject, pipeline, model, before)
        reloaded = subject.fresh()
        load_adapter(reloaded, out)
        equal = torch.equal(subject.sampled(reloaded), subject.sampled(model))
        require(equal, "loading the exported LoRA changes the latents")


def full_export(subject: Subject) -> None:
    """diffusers generates the same latents from an export of all weights."""
    model = subject.fresh()
    before = subject.sampled(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.denoiser.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    with tempfile.TemporaryDirectory() as folder:
        out = export_to(Path(folder) / "out", model, lora=False)
        _same_pictures(subject, stock(out, subject.case), model, before)


def export_to(out: Path, model: DiffusionModel, *, lora: bool) -> Path:
    source: Any = Source(model, lora)
    return export(ExportTarget.of(model), source, out, policy="train", dtype=torch.float32, is_main=True)


def _same_pictures(subject: Subject, pipeline: Any, model: DiffusionModel, before: Tensor) -> None:
    want = subject.sampled(model)
    got = subject.drawn(pipeline, model.sigmas(3, subject.shape), **subject.call(1.0))
    require_close("the latents that diffusers generates from the export", got, want, subject.case.close)
    moved = float((got - before).abs().max())
    require(moved > MATTERS, f"the trained weights changed the latents by only {moved:.1g}")
