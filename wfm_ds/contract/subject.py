"""One family under examination: its folder, its case, and models of it; and how a check says that it failed."""

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
NO_INPUTS = "the family takes inputs: give the case's `inputs`, two samples' arrays"
MOST_FRAMES = 64  # among which two latent frames are looked for


class Broken(Exception):
    """The family does not keep what a check asks: one sentence."""


class DoesNotApply(Exception):
    """The family does not have what a check asks about: why, in a few words."""


def require(kept: bool, sentence: str) -> None:
    """Raise Broken with this sentence unless it is kept."""
    if not kept:
        raise Broken(sentence)


def require_close(what: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """Raise Broken, which says what differs and by how much, unless shapes are equal and values close."""
    require(got.shape == want.shape, f"{what}: the shape is {list(got.shape)} and should be {list(want.shape)}")
    if not torch.allclose(got.double(), want.double(), rtol=rtol, atol=atol):
        most = float((got.double() - want.double()).abs().max())
        raise Broken(f"{what}: values differ by up to {most:.2g}, and {atol:g} is allowed")


@dataclass(frozen=True)
class Subject:
    """A tiny pipeline's folder, and of which family of the user's own it is, unless of one of ours."""

    folder: Path
    case: Case
    own: str | None = None

    @cached_property
    def model(self) -> DiffusionModel:
        """The family in float32, for checks that change nothing."""
        return self.fresh()

    def fresh(self, dtype: torch.dtype = torch.float32, **options: Any) -> DiffusionModel:
        """Load the family anew, for a check that changes it."""
        options = {"dtype": dtype, "device": "cpu", "own_family": self.own, **self.case.load_options, **options}
        return registry.load(self.folder, **options)

    @cached_property
    def told_model(self) -> DiffusionModel:
        """The family as a run has it that tells samples all inputs of the case."""
        return self.fresh(inputs=sorted({name for row in self.inputs() for name in row}))

    def inputs(self) -> list[Inputs]:
        """The inputs of two samples of `size`; none if the case has none."""
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
            except (ValueError, StopIteration):  # no size has this many frames
                continue
            return frames
        raise Broken(f"latent_shape knows no video of 2 to {MOST_FRAMES} frames")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """That of a sample's latents."""
        return self.model.latent_shape(*self.size)

    def noise(self, count: int = 2) -> Tensor:
        return seeded_normal(SEEDS[:count], self.shape)

    def generators(self) -> list[torch.Generator]:
        """Generators with which a stock call draws the same noise."""
        return [torch.Generator("cpu").manual_seed(seed) for seed in SEEDS]

    def pixels(self, count: int = 2) -> Tensor:
        height, width, frames = self.size
        shape = (count, 3, frames, height, width) if self.model.video else (count, 3, height, width)
        levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(5))  # as files have them
        return levels / 255

    def one_call(self, model: DiffusionModel, count: int = 2, expert: int = 0) -> tuple[Tensor, Tensor, Conditioning]:
        """Arguments of one `denoise`: other sigmas, prompts, first frames or numbers of them, and required inputs."""
        given = (min(model.conditional_frames), max(model.conditional_frames)) if model.may_pin else (0, 0)
        conditioning = model.encode_text(PROMPTS[:count]) | self.besides(model, count, given)
        return self.noise(count), torch.tensor(self.case.sigmas[expert])[:count], conditioning

    def told(self, model: DiffusionModel, prompts: Sequence[str]) -> Conditioning:
        """The prompts as a run encodes them: with what the family's pipeline writes into them, and what else it cannot
        do without."""
        text = model.encode_text([model.caption(prompt, *self.size) for prompt in prompts])
        return text | self.besides(model, len(prompts))

    def besides(self, model: DiffusionModel, count: int = 2, given: Sequence[int] | None = None) -> Conditioning:
        """The conditioning of so many samples that each must have besides its text: required inputs, a first frame that
        it is told, and so many first frames that are pinned, else the fewest that the family takes."""
        needed = {name for name, taken in model.takes.items() if taken.required}
        require(not needed or self.case.inputs is not None, NO_INPUTS)
        rows = [{name: row[name] for name in needed} for row in self.inputs()[:count]] if needed else [{}] * count
        told = self.encoded(model, rows, self.pictures)
        given = [min(model.conditional_frames) if model.may_pin else 0] * count if given is None else given[:count]
        if any(given):
            told = with_conditional_frames(told, model.encode_pixels(self.pixels(count)), torch.tensor(given))
        return told

    def encoded(
        self, model: DiffusionModel, rows: Sequence[Inputs], pictures: Sequence[npt.NDArray[np.uint8]]
    ) -> Conditioning:
        """Conditioning of the inputs of some samples, and of the pictures if the family is told first frames so."""
        if not model.pins_frames:
            rows = [row | {FIRST_FRAME: one.astype(np.float32)} for row, one in zip(rows, pictures, strict=False)]
        return model.encode_inputs(rows, self.size[2], self.size[:2]) if any(rows) else {}

    @cached_property
    def pictures(self) -> list[npt.NDArray[np.uint8]]:
        """The first frames [H,W,3] of `pixels`."""
        levels = (255 * self.pixels()).round().to(torch.uint8)
        return list((levels[:, :, 0] if self.model.video else levels).movedim(1, -1).numpy())

    def call(self, w: float, **more: Any) -> dict[str, Any]:
        """Arguments of a stock call for PROMPTS and SEEDS."""
        call = {**self.model.pipeline_call(w, *self.size), "generator": self.generators()}
        if not self.model.pins_frames:
            call["image"] = [Image.fromarray(one) for one in self.pictures]
        asked = {} if self.case.asked is None else self.case.asked(self.pixels())
        return {**call, **asked, **more}

    def sampled(self, model: DiffusionModel, steps: int = 3) -> Tensor:
        """Our own latents of PROMPTS and SEEDS, without guidance."""
        grid = model.sigmas(steps, self.shape)
        return denoise_latents(model, self.noise(), self.told(model, PROMPTS), grid, solver="ode")

    def drawn(self, pipeline: Any, sigmas: Sequence[float] | Tensor, **call: Any) -> Tensor:
        """The latents that a stock pipeline makes, as the family has them."""
        latents = draw(pipeline, self.case, sigmas, **call)
        return latents if self.case.unpack is None else self.case.unpack(self.model, latents)
