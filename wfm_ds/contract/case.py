"""Settings for the checks of a model family, and functions that run the family's diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from wfm_ds.models.assets.loading import hide_progress_bars, read_json, resolve_pipeline_class
from wfm_ds.models.base import DiffusionModel
from wfm_ds.sampling.plan import deterministic_plan
from wfm_ds.types import Conditioning

PROMPTS = ["a red circle on white", "the digit 7"]


SampleInputs: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ReferenceInputs:
    """A call of the diffusers pipeline for one sample with inputs such as actions."""

    size: tuple[int, int, int]
    """Height, width and number of frames of the sample. The pipeline must support this size together with inputs."""
    call: Callable[[Path, Tensor], tuple[Any, SampleInputs, dict[str, Any]]]
    """Maps (folder, pixels [1,3,...]) to (pipeline, inputs of the sample, pipeline call arguments)."""
    num_conditioning_frames: int = 0
    """Number of conditioning latent frames that the pipeline encodes from the pixels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings for the checks of one tiny pipeline. The defaults fit most families."""

    size: tuple[int, int, int] | None = None
    """Height, width and number of frames of the samples. If None, the height is 2 * size_multiple and the width 3 *
    size_multiple; images have 1 frame, and videos have the number of frames that gives two latent frames."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for registry.load_model."""
    extra_components: Mapping[str, Any] = field(default_factory=dict)
    """Components that the diffusers pipeline needs and the folder does not contain."""
    has_euler_scheduler: bool = False
    """Whether the pipeline's scheduler takes Euler steps with float timesteps, like the wfm_ds solver `ode`."""
    conditioning_frames_call: Callable[..., tuple[Any, dict[str, Any]]] | None = None
    """Maps (folder, pixels, number of conditioning frames) to the diffusers pipeline and its call arguments."""
    inputs: Callable[[int, int, int], Sequence[SampleInputs]] | None = None
    """Maps (height, width, frames) to {name: array} for each of two different samples. Required for families with
    `input_specs`. Images must already have the size to which the diffusers pipeline would resize them."""
    reference_inputs: ReferenceInputs | None = None
    """How to call the diffusers pipeline for a sample with inputs. None: skip the comparison with diffusers."""
    sigmas: tuple[tuple[float, float], ...] = ((0.9, 0.3),)
    """For each expert network, the sigmas of the two samples in a batch."""
    block_lists: tuple[str, ...] = ()
    """Denoiser attributes that contain lists of blocks, such as "transformer_blocks". If set, block_classes must match
    exactly these blocks."""
    zero_gradient_parameters: tuple[str, ...] = ()
    """Parameters with a mathematically zero gradient that is nonzero in autograd because of rounding errors. Parameters
    without any gradient belong in the family's `unused_parameter_patterns`."""
    takes_negative_prompt: bool = True
    """Whether the diffusers pipeline accepts a negative prompt."""
    one_sample_per_call: bool = False
    """Whether the diffusers pipeline generates only one sample per call."""
    shared_arguments: tuple[str, ...] = ()
    """Pipeline call arguments that are lists but apply to all samples. Other lists have one item per sample."""
    required_call_kwargs: Callable[[Tensor], Mapping[str, Any]] | None = None
    """Maps the pixels of two samples to pipeline call arguments for required inputs and conditioning frames. Each
    argument is a list."""
    read_latents: Callable[[Any], Tensor] | None = None
    """Maps the output of the diffusers pipeline to latents. None: the images or videos in the output are the
    latents."""
    unpack_latents: Callable[[DiffusionModel, Tensor], Tensor] | None = None
    """Maps (model, latents from diffusers) to latents in the layout of wfm_ds. None: the layouts are equal."""
    vae_has_frame_axis: bool = False
    """Whether an image family uses a video VAE."""
    tolerance: float = 1e-5
    """Maximum absolute difference between the latents or pixels of wfm_ds and diffusers."""


class FixedGridEuler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """An Euler scheduler with given sigmas and float timesteps. It takes the same steps as the solver `ode`."""

    def use_grid(self, sigmas: Sequence[float] | Tensor) -> FixedGridEuler:
        self.grid = [float(sigma) for sigma in sigmas[:-1]]
        return self

    # Keep the parameter `sigmas`, because diffusers checks whether the signature has it.
    def set_timesteps(
        self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None, **_: Any
    ) -> None:
        super().set_timesteps(sigmas=self.grid, device=device)


def load_reference_pipeline(folder: Path, case: Case, pipeline_class: Any = None) -> Any:
    """Load the pipeline of a folder. pipeline_class: None selects the class that model_index.json names."""
    pipeline_class = pipeline_class or resolve_pipeline_class(read_json(folder / "model_index.json"))
    with hide_progress_bars():
        pipeline = pipeline_class.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, **case.extra_components
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
    """Sample clean latents with the wfm_ds sampling loop.

    guidance_scale: one number, or {expert: number}. uncond: negative conditioning, or None for no guidance.
    """

    def predict(latents: Tensor, sigma: float) -> Tensor:
        sigma_B, expert = torch.full((len(latents),), sigma), model.select_expert(sigma)
        velocity = model.denoise(latents, sigma_B, conditioning, expert)
        if uncond is None:
            return velocity
        w = guidance_scale[expert] if isinstance(guidance_scale, Mapping) else guidance_scale
        return model.combine_guidance(velocity, model.denoise(latents, sigma_B, uncond, expert), w)

    with torch.no_grad():
        return deterministic_plan(solver, sigmas).denoise(predict, noise, [0] * len(noise)).clean_latents


def run_reference_pipeline(pipeline: Any, case: Case, sigmas: Sequence[float] | Tensor, /, **more: Any) -> Tensor:
    """Generate samples with a diffusers pipeline and these sigmas.

    Returns latents in the pipeline's layout. With output_type "pt", returns images [B,C,H,W] or videos [B,C,F,H,W].
    more: further arguments of the pipeline call, and optionally `guider`, the config of the pipeline's guider. The
    default prompts are PROMPTS.
    """
    if not case.has_euler_scheduler:
        pipeline.scheduler = FixedGridEuler(shift=1.0).use_grid(sigmas)
    call: dict[str, Any] = {"prompt": PROMPTS, "output_type": "latent", "num_inference_steps": len(sigmas) - 1, **more}
    count = len(call["prompt"])
    if (guider := call.pop("guider", None)) is not None:
        pipeline.guider = pipeline.guider.from_config(guider)
    if isinstance(call.get("negative_prompt"), str):
        call["negative_prompt"] = [call["negative_prompt"]] * count
    # Copy all lists, because pipelines may modify them.
    call = {name: list(value) if isinstance(value, list) else value for name, value in call.items()}
    shared = {name: call.pop(name) for name in case.shared_arguments if name in call}
    calls = [
        shared | {name: value[i] if isinstance(value, list) else value for name, value in call.items()}
        for i in range(count)
    ]
    call |= shared
    read = _output_tensor if case.read_latents is None or call["output_type"] != "latent" else case.read_latents
    output = (
        torch.cat([_sample_tensor(pipeline(**one)) for one in calls])
        if case.one_sample_per_call
        else read(pipeline(**call))
    )
    return output.movedim(2, 1) if call["output_type"] == "pt" and output.ndim == 5 else output


def _output_tensor(output: Any) -> Tensor:
    tensor: Tensor = next(getattr(output, name) for name in ("images", "frames", "video") if hasattr(output, name))
    return tensor


def _sample_tensor(output: Any) -> Tensor:
    """Return the result of a call for one sample, with a batch axis. Frames [F,C,H,W] of a video have none."""
    tensor = _output_tensor(output)
    return tensor if hasattr(output, "images") or tensor.ndim == 5 else tensor[None]
