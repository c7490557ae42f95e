"""The model family under test, and the exceptions that checks raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from wfm_ds.contract.case import (
    PROMPTS,
    Case,
    SampleInputs,
    denoise_latents,
    load_reference_pipeline,
    run_reference_pipeline,
)
from wfm_ds.models import registry
from wfm_ds.models.base import DiffusionModel, NegativeText, TextWithImages
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.types import FIRST_FRAME, Conditioning

SEEDS = [11, 12]
NO_CASE_INPUTS = "the family has inputs: set `inputs` of the case to the arrays of two samples"
LARGER_WEIGHTS = "use larger random weights in the tiny pipeline (docs/own_model.md)"
MAX_FRAMES = 64  # largest number of frames to try for two latent frames


class CheckFailed(Exception):
    """Raised by a failed check. The message is one sentence."""


class CheckNotApplicable(Exception):
    """Raised by a check that does not apply to the family. The message gives the reason."""


def fail_unless(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


def require_close(description: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """Raise CheckFailed unless `got` and `want` have the same shape and their values agree within the tolerances."""
    fail_unless(
        got.shape == want.shape, f"{description}: the shape is {list(got.shape)} and should be {list(want.shape)}"
    )
    if not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
        difference = float((got.double() - want.double()).abs().max())
        raise CheckFailed(f"{description}: values differ by up to {difference:.2g}, allowed: {atol:g}")


def require_effect(description: str, one: Tensor, other: Tensor, least: float) -> None:
    """Raise CheckFailed unless two tensors differ by more than `least`. description: such as "two prompts differ"."""
    difference = float((one - other).abs().max())
    fail_unless(
        difference > least, f"{description} by only {difference:.1g}, required: more than {least:g}; {LARGER_WEIGHTS}"
    )


@dataclass(frozen=True)
class FamilyUnderTest:
    """A tiny pipeline folder, the family to test with it, and the settings of the checks."""

    folder: Path
    case: Case
    user_family: str | None = None

    @cached_property
    def model(self) -> DiffusionModel:
        """The model in float32, shared by all checks that do not modify it."""
        return self.load_model()

    def load_model(self, dtype: torch.dtype = torch.float32, **options: Any) -> DiffusionModel:
        specs = registry.find_family(self.folder, self.user_family).input_specs
        required = [name for name, spec in specs.items() if spec.required]
        options = {"dtype": dtype, "device": "cpu", "inputs": required, **self.case.load_options, **options}
        return registry.load_model(self.folder, user_family=self.user_family, **options)

    @cached_property
    def model_with_inputs(self) -> DiffusionModel:
        """The model, loaded with all inputs of the case. Raises CheckNotApplicable if the family has no inputs."""
        specs = self.model.input_specs
        if not specs:
            raise CheckNotApplicable("the family has no inputs")
        fail_unless(self.case.inputs is not None, NO_CASE_INPUTS)
        names = {name for row in self.sample_inputs() for name in row}
        unknown = sorted(names - specs.keys())
        fail_unless(not unknown, f"the case has inputs {unknown}, but input_specs has {sorted(specs)}")
        return self.load_model(inputs=sorted(names))

    def sample_inputs(self) -> list[SampleInputs]:
        """Return {input name: array} for each of two samples, or [] if the case has no inputs."""
        return [] if self.case.inputs is None else list(self.case.inputs(*self.size))

    def load_reference_pipeline(self) -> Any:
        return load_reference_pipeline(self.folder, self.case)

    @cached_property
    def size(self) -> tuple[int, int, int]:
        """Height, width and number of frames of the samples."""
        if self.case.size is not None:
            return self.case.size
        frames = self._find_two_latent_frames() if self.model.is_video else 1
        multiple = self.model.size_multiple(frames)
        return 2 * multiple, 3 * multiple, frames

    def _find_two_latent_frames(self) -> int:
        for frames in range(2, MAX_FRAMES + 1):
            try:
                self.model.latent_shape(multiple := self.model.size_multiple(frames), multiple, frames)
            except (ValueError, StopIteration):  # no size supports this number of frames
                continue
            return frames
        raise CheckFailed(f"latent_shape supports no video of 2 to {MAX_FRAMES} frames")

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        return self.model.latent_shape(*self.size)

    def initial_noise(self, count: int = 2) -> Tensor:
        return self.model.draw_noise(SEEDS[:count], self.latent_shape)

    def random_pixels(self, count: int = 2) -> Tensor:
        height, width, frames = self.size
        shape = (count, 3, frames, height, width) if self.model.is_video else (count, 3, height, width)
        levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(5))  # 8-bit values
        return levels / 255

    def denoise_arguments(
        self, model: DiffusionModel, count: int = 2, expert: int = 0
    ) -> tuple[Tensor, Tensor, Conditioning]:
        """Return (noise, sigma, conditioning) for `denoise`, different for each sample."""
        counts = model.conditioning_frame_counts if model.supports_clean_frames else (0,)
        texts = self.encode_texts(model, PROMPTS[:count])
        conditioning = texts | self.encode_required_inputs(model, count, (min(counts), max(counts)))
        noise = model.draw_noise(SEEDS[:count], model.latent_shape(*self.size))
        return noise, torch.tensor(self.case.sigmas[expert])[:count], conditioning

    def encode_prompts(self, model: DiffusionModel, prompts: Sequence[str]) -> Conditioning:
        """Format and encode prompts as in training, and add required inputs and conditioning frames."""
        text = self.encode_texts(model, [model.format_prompt(prompt, *self.size) for prompt in prompts])
        return text | self.encode_required_inputs(model, len(prompts))

    def encode_negative_prompt(self, model: DiffusionModel, negative: str | None = None) -> Conditioning:
        """Format and encode a negative prompt (default: the family's) for two samples, and add required inputs."""
        text = model.format_prompt(model.resolve_negative_prompt(negative), *self.size, negative=True)
        return self.encode_texts(model, [text] * 2, negative=True) | self.encode_required_inputs(model)

    def encode_texts(
        self,
        model: DiffusionModel,
        texts: Sequence[str],
        inputs: Sequence[SampleInputs] | None = None,
        *,
        negative: bool = False,
    ) -> Conditioning:
        """Encode formatted texts, each with its sample's images if the text encoder sees images.

        inputs: the inputs of each text's sample. Default: the inputs of the case.
        """
        if not model.text_inputs & model.input_names:
            return (model.encode_negative_text if negative else model.encode_text)(texts)
        fail_unless(self.case.inputs is not None, NO_CASE_INPUTS)
        rows = self.sample_inputs()[: len(texts)] if inputs is None else inputs
        with_images = model.attach_images([NegativeText(text) if negative else text for text in texts], rows)
        encoded = [model.encode_text_with_images(text) for text in with_images if isinstance(text, TextWithImages)]
        return model.stack_conditioning(encoded)

    def require_texts_without_images(self) -> None:
        """Raise CheckNotApplicable if the text encoder sees images."""
        if self.model.text_inputs & self.model.input_names:
            raise CheckNotApplicable("the text encoder sees images, so each text is encoded alone")

    @staticmethod
    def list_required_inputs(model: DiffusionModel) -> list[str]:
        """Return the names of the inputs that each sample must have. They include all images in `model.input_names`."""
        specs = model.input_specs.items()
        return [name for name, spec in specs if spec.required or (spec.is_image and name in model.input_names)]

    def encode_required_inputs(
        self, model: DiffusionModel, count: int = 2, num_frames: Sequence[int] | None = None
    ) -> Conditioning:
        """Encode required inputs and conditioning frames.

        num_frames: number of conditioning latent frames of each sample. None: the minimum of the family.
        """
        required = self.list_required_inputs(model)
        fail_unless(not required or self.case.inputs is not None, NO_CASE_INPUTS)
        samples = self.sample_inputs() if required else [{}] * count
        rows = [{name: row[name] for name in required} for row in samples[:count]]
        conditioning = self.encode_inputs(model, rows, self.first_frames)
        fewest = min(model.conditioning_frame_counts) if model.supports_clean_frames else 0
        counts = [fewest] * count if num_frames is None else num_frames[:count]
        if any(counts):
            latents = model.encode_pixels(self.random_pixels(count))
            conditioning = add_clean_frames(conditioning, latents, torch.tensor(counts))
        return conditioning

    def encode_inputs(
        self, model: DiffusionModel, rows: Sequence[SampleInputs], frames: Sequence[npt.NDArray[np.uint8]]
    ) -> Conditioning:
        """rows: {name: array} for each sample.

        frames: first frames [H,W,3], for families that take them as inputs.
        """
        if not model.uses_clean_frames:
            rows = [row | {FIRST_FRAME: frame.astype(np.float32)} for row, frame in zip(rows, frames, strict=False)]
        return model.encode_inputs(rows, self.size[2], self.size[:2]) if any(rows) else {}

    @cached_property
    def first_frames(self) -> list[npt.NDArray[np.uint8]]:
        """The first frames [H,W,3] of the videos in `random_pixels`."""
        levels = (255 * self.random_pixels()).round().to(torch.uint8)
        return list((levels[:, :, 0] if self.model.is_video else levels).movedim(1, -1).numpy())

    def pipeline_call_kwargs(self, w: float, **more: Any) -> dict[str, Any]:
        """Return the arguments of `run_reference_pipeline` for guidance scale w and the random seeds SEEDS."""
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]  # the noise of `initial_noise`
        call = {**self.model.pipeline_call_kwargs(w, *self.size), "generator": generators}
        if (guider := self.model.guider_config(w)) is not None:
            call["guider"] = guider
        if not self.model.uses_clean_frames:
            call["image"] = [Image.fromarray(frame) for frame in self.first_frames]
        if self.case.required_call_kwargs is not None:
            call |= self.case.required_call_kwargs(self.random_pixels())
        return {**call, **more}

    def sample_latents(self, model: DiffusionModel, steps: int = 3) -> Tensor:
        """Sample latents for PROMPTS and SEEDS with the wfm_ds sampling loop, without guidance."""
        grid = model.sigmas(steps, model.latent_shape(*self.size))
        return denoise_latents(model, self.initial_noise(), self.encode_prompts(model, PROMPTS), grid, solver="ode")

    def reference_latents(self, pipeline: Any, sigmas: Sequence[float] | Tensor, **call: Any) -> Tensor:
        """Generate latents with a diffusers pipeline and convert them to the layout of wfm_ds."""
        latents = run_reference_pipeline(pipeline, self.case, sigmas, **call)
        return latents if self.case.unpack_latents is None else self.case.unpack_latents(self.model, latents)
