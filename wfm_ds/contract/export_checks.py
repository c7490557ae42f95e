"""Checks of exports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor

from wfm_ds.checkpoint.adapter_loading import load_adapter, load_part_adapter
from wfm_ds.contract.case import load_reference_pipeline
from wfm_ds.contract.denoiser_checks import add_random_adapter
from wfm_ds.contract.family_under_test import FamilyUnderTest, fail_unless, require_close, require_effect
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import LORA_FILES, export_weights
from wfm_ds.models.base import DiffusionModel

MIN_TRAINING_EFFECT = 1e-2  # minimum change of the latents by training, so that the comparison is meaningful


@dataclass
class ExportSource:
    """Provides the denoiser's weights for an export, in place of the training engine."""

    model: DiffusionModel
    uses_lora: bool

    def lora_config(self) -> Any:
        module: Any = self.model.denoiser
        return module.peft_config["default"] if self.uses_lora else None

    def iter_full_tensors(self, policy: str) -> Iterator[tuple[str, Tensor]]:
        module = self.model.denoiser
        yield from (get_peft_model_state_dict(module) if self.uses_lora else module.state_dict()).items()


def check_lora_export(subject: FamilyUnderTest) -> None:
    """Check that the trained model and diffusers with the exported LoRA generate the same latents.

    The exported LoRA must have bit-identical weights when it is loaded again.
    """
    model = subject.load_model()
    before = subject.sample_latents(model)
    model.prepare_for_lora(model.default_lora_targets)
    add_random_adapter(model, b_std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        out = export_model(Path(folder) / "out", model, lora=True)
        pipeline = load_reference_pipeline(model.path, subject.case)
        for part in model.denoiser_components:
            load_part_adapter(pipeline, part, out / LORA_FILES[part])
        active = pipeline.transformer.active_adapters()
        fail_unless(active == ["default"], f"diffusers has adapters {active} after loading one")
        _require_same_latents(subject, pipeline, model, before)
        reloaded = subject.load_model()
        load_adapter(reloaded, out)
        equal = torch.equal(subject.sample_latents(reloaded), subject.sample_latents(model))
        fail_unless(equal, "loading the exported LoRA changes the latents")


def check_full_export(subject: FamilyUnderTest) -> None:
    """Check that the trained model and diffusers with the full export generate the same latents."""
    model = subject.load_model()
    before = subject.sample_latents(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.denoiser.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    with tempfile.TemporaryDirectory() as folder:
        out = export_model(Path(folder) / "out", model, lora=False)
        _require_same_latents(subject, load_reference_pipeline(out, subject.case), model, before)


def export_model(out: Path, model: DiffusionModel, *, lora: bool) -> Path:
    source: Any = ExportSource(model, lora)
    return export_weights(
        ExportTarget.from_model(model), source, out, policy="train", dtype=torch.float32, is_main=True
    )


def _require_same_latents(subject: FamilyUnderTest, pipeline: Any, model: DiffusionModel, before: Tensor) -> None:
    want = subject.sample_latents(model)
    got = subject.reference_latents(
        pipeline, model.sigmas(3, subject.latent_shape), **subject.pipeline_call_kwargs(1.0)
    )
    require_close("the latents that diffusers generates from the export", got, want, subject.case.tolerance)
    require_effect("the trained weights change the latents", got, before, MIN_TRAINING_EFFECT)
