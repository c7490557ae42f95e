"""The facts that the checks need about a family besides its class, and calls of its stock pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from wfm_ds.models.base import without_progress_bars
from wfm_ds.sampling.plan import deterministic_plan

if TYPE_CHECKING:
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.types import Conditioning

PROMPTS = ["a red circle on white", "the digit 7"]


Inputs: TypeAlias = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class StockInputs:
    """A call of the stock pipeline that tells one sample its inputs."""

    size: tuple[int, int, int]
    """Height, width, frames: the call may know few."""
    call: Callable[[Path, Tensor], tuple[Any, Inputs, dict[str, Any]]]
    """(folder, pixels of a sample) -> the pipeline, what the sample is told, and arguments of the call."""
    conditional_frames: int = 0
    """How many first latent frames of the pixels the call gives."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny pipeline: what its stock call takes and gives where that differs from most."""

    size: tuple[int, int, int] | None = None
    """Height, width, frames. None: the smallest that are unlike, and for videos two latent frames."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of registry.load."""
    stock_parts: Mapping[str, Any] = field(default_factory=dict)
    """Parts that plain diffusers needs besides the folder."""
    euler: bool = False
    """The stock scheduler is Euler on float times: what our solver `ode` does."""
    given: Callable[..., tuple[Any, dict[str, Any]]] | None = None
    """(folder, pixels, count) -> the stock pipeline and arguments of its call for given frames."""
    inputs: Callable[[int, int, int], Sequence[Inputs]] | None = None
    """(height, width, frames) -> arrays by name, as `takes` has them, of two unlike samples. Families that state
    `takes` need it."""
    stock_inputs: StockInputs | None = None
    """None: inputs are not compared with the stock pipeline."""
    sigmas: tuple[tuple[float, float], ...] = ((0.9, 0.3),)
    """Noise levels of two samples, for each expert."""
    blocks: tuple[str, ...] = ()
    """The lists of the denoiser that hold its blocks. (): not compared."""
    without_gradient: tuple[str, ...] = ()
    """Parameters whose gradient is rounding alone: no loss depends on them, but autograd does not know. Those that it
    does not reach are the family's `frozen`."""
    negative_prompt: bool = True
    """The stock call takes one."""
    one_by_one: bool = False
    """The stock call draws one sample."""
    shared: tuple[str, ...] = ()
    """Arguments of the stock call that are lists, but not of one for each sample."""
    asked: Callable[[Tensor], Mapping[str, Any]] | None = None
    """(pixels of two samples) -> arguments of the stock call for their inputs and the frames that it cannot do without,
    in lists."""
    unpack: Callable[[DiffusionModel, Tensor], Tensor] | None = None
    """(model, what the stock call gives as latents) -> latents as the family has them. None: they are."""
    frame_axis: bool = False
    """The VAE of this family of images is one of videos."""
    close: float = 1e-5
    """How far from the stock pipeline's numbers ours may be, in latents and pixels."""


class GridEuler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """Euler on a given grid, with float times: makes a stock pipeline step as our `ode` does."""

    def on(self, sigmas: Sequence[float] | Tensor) -> GridEuler:
        self.grid = [float(sigma) for sigma in sigmas[:-1]]
        return self

    # diffusers looks for `sigmas` among the names of the arguments.
    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, **_: Any
    ) -> None:
        super().set_timesteps(sigmas=self.grid, device=device)


def stock(folder: Path, case: Case, pipeline_class: Any = DiffusionPipeline) -> Any:
    """The plain diffusers pipeline of a folder: of the class that it names, or of another one."""
    with without_progress_bars():
        pipeline = pipeline_class.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, **case.stock_parts
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoise_latents(
    model: DiffusionModel,
    noise: Tensor,
    conditioning: Conditioning,
    sigmas: Tensor,
    *,
    solver: str,
    guidance_scale: float | Mapping[int, float] = 1.0,
    uncond: Conditioning | None = None,
) -> Tensor:
    """Our own clean latents. guidance_scale: a number, or one for each expert."""

    def predict(latents: Tensor, sigma: float) -> Tensor:
        sigma_B, expert = torch.full((len(latents),), sigma), model.expert_of(sigma)
        velocity = model.denoise(latents, sigma_B, conditioning, expert)
        if uncond is None:
            return velocity
        w = guidance_scale[expert] if isinstance(guidance_scale, Mapping) else guidance_scale
        return model.combine_guidance(velocity, model.denoise(latents, sigma_B, uncond, expert), w)

    with torch.no_grad():
        return deterministic_plan(solver, sigmas).run(predict, noise, [0] * len(noise)).clean


def draw(pipeline: Any, case: Case, sigmas: Sequence[float] | Tensor, **more: Any) -> Tensor:
    """Return what a stock pipeline makes of PROMPTS, or more["prompt"], on this grid: images [B,C,H,W], frames
    [B,C,F,H,W], or latents as it has them. more: arguments of its call."""
    if not case.euler:
        pipeline.scheduler = GridEuler(shift=1.0).on(sigmas)
    call: dict[str, Any] = {"prompt": PROMPTS, "output_type": "latent", "num_inference_steps": len(sigmas) - 1, **more}
    count = len(call["prompt"])
    if isinstance(call.get("negative_prompt"), str):
        call["negative_prompt"] = [call["negative_prompt"]] * count
    call = {name: list(value) if isinstance(value, list) else value for name, value in call.items()}  # some write in it
    shared = {name: call.pop(name) for name in case.shared if name in call}
    calls = [shared | {name: _of_one(value, i) for name, value in call.items()} for i in range(count)]
    call |= shared
    drawn = (
        torch.cat([_of_batch(_drawn(pipeline(**one))) for one in calls])
        if case.one_by_one
        else _drawn(pipeline(**call))
    )
    return drawn.movedim(2, 1) if call["output_type"] == "pt" and drawn.ndim == 5 else drawn


def _drawn(output: Any) -> Tensor:
    drawn: Tensor = next(getattr(output, name) for name in ("images", "frames", "video") if hasattr(output, name))
    return drawn


def _of_batch(video: Tensor) -> Tensor:
    """One video's latents [1,C,T,h,w] as they are, its frames [F,C,H,W] with an axis more."""
    return video if video.ndim == 5 else video[None]


def _of_one(value: Any, i: int) -> Any:
    """The share of sample `i` in an argument that has one for each."""
    return value[i] if isinstance(value, list) else value
