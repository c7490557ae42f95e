"""The family under test: its folder, case and loaded models, and the exceptions of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from wfm_ds.contract.case import PROMPTS, Case, Inputs, denoise_latents, draw, stock
from wfm_ds.models import registry
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.sampling.noise import seeded_normal
from wfm_ds.types import FIRST_FRAME

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.types import Conditioning

SEEDS = [11, 12]
NO_INPUTS = "the family has inputs: set `inputs` of the case to the arrays of two samples"
MOST_FRAMES = 64  # up to which two latent frames are searched


class Broken(Exception):
    """A check failed. The message is one sentence."""


class DoesNotApply(Exception):
    """A check does not apply to the family. The message gives the reason."""


def require(condition: bool, message: str) -> None:
    """Raise CheckFailed with this message unless the condition holds."""
    if not condition:
        raise Broken(message)


def require_close(description: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """Raise CheckFailed with the difference unless shapes are equal and values are close."""
    require(got.shape == want.shape, f"{description}: the shape is {list(got.shape)} and should be {list(want.shape)}")
    if not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
        difference = float((got.double() - want.double()).abs().max())
        raise Broken(f"{description}: values differ by up to {difference:.2g}, allowed: {atol:g}")


@dataclass(frozen=True)
class Subject:
    """The folder of a tiny pipeline and its family: a built-in one, or the user's class."""

    folder: Path
    case: Case
    own: str | None = None

    @cached_property
    def model(self) -> DiffusionModel:
        """The model in float32, shared by checks that do not modify it."""
        return self.fresh()

    def fresh(self, dtype: torch.dtype = torch.float32, **options: Any) -> DiffusionModel:
        """Load a new model, for a check that modifies it."""
        options = {"dtype": dtype, "device": "cpu", **self.case.load_options, **options}
        return registry.load(self.folder, own_family=self.own, **options)

    @cached_property
    def told_model(self) -> DiffusionModel:
        """The model with all inputs of the case, as in a run with data.inputs."""
        return self.fresh(inputs=sorted({name for row in self.inputs() for name in row}))

    def inputs(self) -> list[Inputs]:
        """Return the inputs of two samples of `size`; empty if the case has none."""
        return [] if self.case.inputs is None else list(self.case.inputs(*self.size))

    def stock(self) -> Any:
        return stock(self.folder, self.case)

    @cached_property
    def size(self) -> tuple[int, int, int]:
        """Height, width, frames."""
        if self.case.size is not None:
            return self.case.size
        frames = self._two_latent_frames() if self.model.video else 1
        multiple = self.model.size_multiple(frames)
        return 2 * multiple, 3 * multiple, frames

    def _two_latent_frames(self) -> int:
        for frames in range(2, MOST_FRAMES + 1):
            try:
                self.model.latent_shape(multiple := self.model.size_multiple(frames), multiple, frames)
            except (ValueError, StopIteration):  # no size supports this number of frames
                continue
            return frames
        raise Broken(f"latent_shape supports no video of 2 to {MOST_FRAMES} frames")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample's latents."""
        return self.model.latent_shape(*self.size)

    def noise(self, count: int = 2) -> Tensor:
        return seeded_normal(SEEDS[:count], self.shape)

    def generators(self) -> list[torch.Generator]:
        """Return generators with which the diffusers pipeline draws the same noise."""
        return [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]

    def pixels(self, count: int = 2) -> Tensor:
        height, width, frames = self.size
        shape = (count, 3, frames, height, width) if self.model.video else (count, 3, height, width)
        levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(5))  # 8-bit values
        return levels / 255

    def one_call(self, model: DiffusionModel, count: int = 2, expert: int = 0) -> tuple[Tensor, Tensor, Conditioning]:
        """Return arguments of `denoise` with different sigmas, prompts, conditioning frames and required inputs."""
        num_frames = (min(model.conditional_frames), max(model.conditional_frames)) if model.may_pin else (0, 0)
        conditioning = model.encode_text(PROMPTS[:count]) | self.besides(model, count, num_frames)
        return self.noise(count), torch.tensor(self.case.sigmas[expert])[:count], conditioning

    def told(self, model: DiffusionModel, prompts: Sequence[str]) -> Conditioning:
        """Format and encode prompts as a run does, with required inputs and conditioning frames."""
        text = model.encode_text([model.caption(prompt, *self.size) for prompt in prompts])
        return text | self.besides(model, len(prompts))

    def besides(self, model: DiffusionModel, count: int = 2, num_frames: Sequence[int] | None = None) -> Conditioning:
        """Encode required inputs and conditioning frames of `count` samples.

        num_frames: number of clean conditioning frames per sample; default: the family's minimum.
        """
        required = {name for name, spec in model.takes.items() if spec.required}
        require(not required or self.case.inputs is not None, NO_INPUTS)
        rows = [{name: row[name] for name in required} for row in self.inputs()[:count]] if required else [{}] * count
        conditioning = self.encoded(model, rows, self.pictures)
        fewest = min(model.conditional_frames) if model.may_pin else 0
        counts = [fewest] * count if num_frames is None else num_frames[:count]
        if any(counts):
            latents = model.encode_pixels(self.pixels(count))
            conditioning = with_conditional_frames(conditioning, latents, torch.tensor(counts))
        return conditioning

    def encoded(
        self, model: DiffusionModel, rows: Sequence[Inputs], frames: Sequence[npt.NDArray[np.uint8]]
    ) -> Conditioning:
        """Encode the inputs of samples, with first frames if the family takes them as an input."""
        if not model.pins_frames:
            rows = [row | {FIRST_FRAME: frame.astype(np.float32)} for row, frame in zip(rows, frames, strict=False)]
        return model.encode_inputs(rows, self.size[2], self.size[:2]) if any(rows) else {}

    @cached_property
    def pictures(self) -> list[npt.NDArray[np.uint8]]:
        """The first frames [H,W,3] of `random_pixels`."""
        levels = (255 * self.pixels()).round().to(torch.uint8)
        return list((levels[:, :, 0] if self.model.video else levels).movedim(1, -1).numpy())

    def call(self, w: float, **more: Any) -> dict[str, Any]:
        """Return arguments of the diffusers pipeline for PROMPTS and SEEDS."""
        call = {**self.model.pipeline_call(w, *self.size), "generator": self.generators()}
        if not self.model.pins_frames:
            call["image"] = [Image.fromarray(frame) for frame in self.pictures]
        required = {} if self.case.asked is None else self.case.asked(self.pixels())
        return {**call, **required, **more}

    def sampled(self, model: DiffusionModel, steps: int = 3) -> Tensor:
        """Sample latents for PROMPTS and SEEDS with our loop, without guidance."""
        grid = model.sigmas(steps, self.shape)
        return denoise_latents(model, self.noise(), self.told(model, PROMPTS), grid, solver="ode")

    def drawn(self, pipeline: Any, sigmas: Sequence[float] | Tensor, **call: Any) -> Tensor:
        """Return the latents that a diffusers pipeline generates, in our layout."""
        latents = draw(pipeline, self.case, sigmas, **call)
        return latents if self.case.unpack is None else self.case.unpack(self.model, latents)
