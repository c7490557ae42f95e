"""Samples images or videos from prompts and noise seeds, for rollouts, validation and `wfm generate`.

On a GPU, latents are decoded on a separate CUDA stream. Decoding on this stream has not been run on a GPU yet; tests
check the order of the CUDA calls.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.errors import RecipeError
from wfm_ds.models import vae
from wfm_ds.models.assets.text_cache import PromptText, Text, TextCache, format_prompts, prompt_text
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.guidance import NEGATIVE_PASS, GuidancePass
from wfm_ds.recipe.sampling import CPS_EVAL_NOISE, SamplingRecipe
from wfm_ds.sampling.denoise import SamplingPlan, Trajectory
from wfm_ds.sampling.plan import deterministic_plan, stochastic_plan
from wfm_ds.types import Conditioning, ConditioningFrames, Prompt

if TYPE_CHECKING:
    from wfm_ds.engine.engine import DenoiserEngine

UNCONDITIONAL = "uncond"  # purpose of the unconditional forward passes in training; sampling uses its own purpose

DenoiseFunction: TypeAlias = Callable[..., Tensor]
"""DiffusionModel.denoise."""
ForwardFunction: TypeAlias = Callable[..., Tensor]
"""DiffusionModel.denoise with an additional first argument `purpose`, such as "rollout", and an optional last one,
`variant` (see GuidancePass)."""


class CountingForward:
    """A ForwardFunction that counts forward passes (`counts`) and samples (`num_samples`) for each purpose."""

    def __init__(
        self, denoise: DenoiseFunction, engine: DenoiserEngine | None = None, *, one_size: bool = True
    ) -> None:
        """engine: if set, it checks before each forward pass that all ranks run the same forward pass.

        one_size: whether all replicas use the same height and width, so that the check also compares the sizes.
        """
        self._denoise, self._engine, self._one_size = denoise, engine, one_size
        self.counts: Counter[str] = Counter()
        self.num_samples: Counter[str] = Counter()

    def reset_counts(self) -> None:
        self.counts.clear()
        self.num_samples.clear()

    def __call__(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        expert: int | None = None,
        variant: str = "",
        /,
    ) -> Tensor:
        """Predict the velocity with the active policy. Returns float32 in the shape of the latents.

        latents: [batch, ...]. sigma: [batch]. conditioning: {name: tensor [batch, ...]}.
        expert: index of the expert network, for models with two experts. None: sigma determines the expert.
        variant: a change of the network, see GuidancePass.
        """
        self.counts[purpose] += 1
        self.num_samples[purpose] += len(sigma)
        if self._engine is not None:
            shape = latents.shape if self._one_size else latents.shape[:-2]
            what = (self._engine.active_policy, torch.is_grad_enabled(), tuple(shape), expert, variant)
            self._engine.check_ranks_agree(*what, inputs=(latents, sigma, *conditioning.values()))
        # Only families with variants have the argument.
        return self._denoise(latents, sigma, conditioning, expert, *([variant] if variant else []))


@dataclass(frozen=True, slots=True)
class PendingPixels:
    """Decoded pixels and finiteness flags in host memory. They are valid once `done_event` has completed."""

    pixels: Sequence[Tensor]  # uint8 [n,3,H,W] or [n,3,F,H,W], on the host
    finite: Tensor  # bool [B], on the host
    done_event: torch.cuda.Event | None  # None: already done

    @property
    def is_pending(self) -> bool:
        """Whether decoding may still be running on the GPU."""
        return self.done_event is not None

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Wait for decoding. Return (samples, finite).

        samples: uint8 images [decoded samples, height, width, 3] or videos [decoded samples, frames, height, width, 3],
        or an empty array of shape [0] if no samples were decoded.
        finite: one flag for each sample of the batch, even if it was not decoded. A flag is False if the sample's
        latents contain non-finite values.
        """
        if self.done_event is not None:
            self.done_event.synchronize()
        pixels = [np.ascontiguousarray(part.movedim(1, -1).numpy()) for part in self.pixels]
        return np.concatenate(pixels) if pixels else np.empty(0, np.uint8), self.finite.tolist()


@functools.cache
def get_decode_stream(device: torch.device) -> Any:
    """Return the CUDA stream for decoding on this GPU, or None for a CPU."""
    cuda: Any = torch.cuda  # torch.cuda streams and events are untyped
    return cuda.Stream(device) if device.type == "cuda" else None


@contextlib.contextmanager
def run_on_decode_stream(device: torch.device, latents: Tensor) -> Iterator[Any]:
    """Run the `with` block on the decoding stream. Yields a CUDA event for the end of the block, or None on a CPU.

    The block waits for work that is already queued on the caller's stream, but not for work that is queued later.
    latents: input of the block, computed on the caller's stream.
    """
    stream = get_decode_stream(device)
    if stream is None:
        yield None
        return
    cuda: Any = torch.cuda
    done = cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield done
        done.record(stream)
    latents.record_stream(stream)  # keep its memory until the stream has read it


@dataclass(frozen=True, slots=True)
class GuidanceConditioning:
    """Positive conditioning of a batch of samples and, if guidance is used, their negative conditioning."""

    positive: Conditioning
    negative: Conditioning | None  # None: no guidance

    def join_halves(self, model: DiffusionModel) -> Conditioning:
        """Return one conditioning with the positive rows followed by the negative rows.

        Raises RecipeError if the shapes of positive and negative tensors differ.
        """
        assert self.negative is not None
        try:
            return model.stack_conditioning([self.positive, self.negative])
        except ValueError as error:
            raise RecipeError(
                f"sampling.guidance_batch: joint needs texts of the same shape, but {error}: set it to separate"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Generates samples with the model's current weights, as specified by the recipe's `sampling` section."""

    model: DiffusionModel
    text_cache: TextCache
    settings: SamplingRecipe
    forward: ForwardFunction
    max_joint_rows: Mapping[str, int] = field(default_factory=dict)
    """{purpose: maximum number of rows in a joint forward pass, which has two rows per sample}. If there would be more
    rows, or if the purpose has no entry, `generate` runs two separate forward passes."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Latent shape of one sample: (channels, [latent frames,] h, w). Raises ValueError for an unsupported size."""
        size = self.settings
        return self.model.latent_shape(size.height, size.width, size.num_frames)

    def evaluation_plan(self) -> SamplingPlan:
        """Return the sampling plan for validation and `wfm generate`. Raises ModelError for unsupported sigmas."""
        sigmas = self.model.evaluation_sigmas(self.settings)
        if self.eval_solver == "cps":
            return stochastic_plan("cps", sigmas, noise_level=CPS_EVAL_NOISE)
        return deterministic_plan(self.eval_solver, sigmas)

    @property
    def eval_solver(self) -> str:
        default = self.model.default_solver if self.settings.eval_grid == "stock" else "ode"
        return self.settings.eval_solver or default

    def generate(
        self,
        purpose: str,
        prompts: Sequence[Prompt],
        noise_seeds: Sequence[int],
        plan: SamplingPlan,
        *,
        seeds: Sequence[int] | None = None,
        conditional_frames: ConditioningFrames | None = None,
        shape: tuple[int, ...] | None = None,
        keep_passes: bool = False,
    ) -> Trajectory:
        """Denoise one sample for each prompt according to a sampling plan.

        purpose: name under which the forward passes are counted.
        noise_seeds: seeds of the initial noise, one per prompt.
        seeds: seeds of the noise that the plan adds in later steps, one per prompt. Default: noise_seeds.
        shape: shape of one sample's latents. Default: latent_shape.
        keep_passes: whether to keep the predictions of the guidance passes in the stored steps of a FlowPlan.
        """
        conditions = self.encode_conditioning(prompts, conditional_frames, shape)
        joint = not keep_passes and 2 * len(prompts) <= self.max_joint_rows.get(purpose, 0)
        kept: dict[int, Mapping[str, Tensor]] = {}  # predictions of the guidance passes, by stored step
        steps = itertools.count()

        def predict(latents: Tensor, sigma: float) -> Tensor:
            sigma_B = torch.full((len(latents),), sigma, dtype=torch.float32, device=latents.device)
            expert = self.model.select_expert(sigma)
            passes = self.model.guidance_passes(self.settings, expert, sigma)
            if joint and NEGATIVE_PASS in passes:
                return self.predict_joint_velocity(purpose, latents, sigma_B, conditions, expert, passes)
            known, step = None, next(steps)
            if keep_passes and step in plan.stored_steps and passes:
                kept[step] = known = self._predict_others(purpose, latents, sigma_B, conditions, expert, passes)
            return self.predict_velocity(
                purpose, latents, sigma_B, conditions, expert, negative_purpose=purpose, passes=passes, known=known
            )

        noise = self.model.draw_noise(noise_seeds, shape or self.latent_shape, self.model.device)
        trajectory = plan.denoise(predict, noise, noise_seeds if seeds is None else seeds, conditional_frames)
        if not keep_passes:
            return trajectory
        stored_steps = [replace(step, passes=kept.get(step.index, {})) for step in trajectory.stored_steps]
        return replace(trajectory, stored_steps=stored_steps)

    def predict_velocity(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditions: GuidanceConditioning,
        expert: int,
        *,
        negative_purpose: str = UNCONDITIONAL,
        guidance_scale: float | None = None,
        passes: Sequence[GuidancePass] | None = None,
        known: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Predict the float32 velocity with one expert network, and apply guidance if this expert uses guidance.

        The conditional forward pass has a gradient and is counted under `purpose`. The other passes have no gradient
        and are counted under `negative_purpose`.
        guidance_scale: scale of plain classifier-free guidance. None selects the guidance of the recipe.
        passes: the passes besides the conditional one. None selects the passes of all noise levels.
        known: predictions of all `passes`, by name, to use instead of running them. Empty or None: run them.
        """
        if guidance_scale is not None:
            passes = () if guidance_scale == 1 else (NEGATIVE_PASS,)
        elif passes is None:
            passes = self.model.guidance_passes(self.settings, expert)
        conditional = self.forward(purpose, latents, sigma, conditions.positive, expert)
        if conditions.negative is None or not passes:
            return conditional
        others = known or self._predict_others(negative_purpose, latents, sigma, conditions, expert, passes)
        if guidance_scale is not None:
            return self.model.combine_guidance(conditional, others[NEGATIVE_PASS.name], guidance_scale)
        return self.model.combine_passes(conditional, others, latents, sigma, self.settings, expert)

    @torch.no_grad()
    def _predict_others(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditions: GuidanceConditioning,
        expert: int,
        passes: Sequence[GuidancePass],
    ) -> dict[str, Tensor]:
        """Return {name: prediction} of guidance passes."""
        assert conditions.negative is not None
        conditioning = {True: conditions.negative, False: conditions.positive}
        return {
            one.name: self.forward(purpose, latents, sigma, conditioning[one.negative], expert, one.variant)
            for one in passes
        }

    def predict_joint_velocity(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditions: GuidanceConditioning,
        expert: int,
        passes: Sequence[GuidancePass],
    ) -> Tensor:
        """Predict the velocity with guidance, with one pass of two rows per sample for positive and negative prompts.

        The result may differ from `predict_velocity` by rounding errors. `passes` must contain the negative pass.
        """
        both = torch.cat([latents] * 2), torch.cat([sigma] * 2), conditions.join_halves(self.model)
        conditional, negative = self.forward(purpose, *both, expert).chunk(2)
        more = [one for one in passes if one != NEGATIVE_PASS]
        others = self._predict_others(purpose, latents, sigma, conditions, expert, more)
        others[NEGATIVE_PASS.name] = negative
        return self.model.combine_passes(conditional, others, latents, sigma, self.settings, expert)

    def encode_conditioning(
        self,
        prompts: Sequence[Prompt],
        conditional_frames: ConditioningFrames | None = None,
        shape: Sequence[int] | None = None,
        *,
        guided: bool | None = None,
    ) -> GuidanceConditioning:
        """Encode the texts and inputs (such as actions) of prompts, and conditioning frames.

        If guidance is used, also encode negative prompts.
        shape: shape of one sample's latents. Default: latent_shape.
        guided: whether guidance is used. Default: whether the recipe enables guidance for any expert.
        """
        inputs = [prompt.inputs for prompt in prompts]
        texts = self.format_prompts([prompt_text(prompt) for prompt in prompts], inputs, shape)
        positive = self.text_cache.encode(texts)
        negative = None
        if self.settings.uses_guidance() if guided is None else guided:
            texts = self.format_prompts(negative_texts(self.model, self.settings, prompts), inputs, shape)
            negative = self.text_cache.encode(texts)
        shared = self.encode_inputs(inputs, conditional_frames, shape)
        return GuidanceConditioning(positive | shared, None if negative is None else negative | shared)

    def format_prompts(
        self,
        texts: Sequence[PromptText],
        inputs: Sequence[Mapping[str, npt.NDArray[Any]]],
        shape: Sequence[int] | None = None,
    ) -> list[Text]:
        """Format texts and add the images that the text encoder sees, from the inputs of each sample.

        shape: shape of one sample's latents. Default: latent_shape.
        """
        formatted = format_prompts(self.model, texts, self.pixel_size(shape), self.settings.num_frames)
        return self.model.attach_images(formatted, inputs)

    def encode_inputs(
        self,
        inputs: Sequence[Mapping[str, npt.NDArray[Any]]],
        conditional_frames: ConditioningFrames | None,
        shape: Sequence[int] | None = None,
    ) -> Conditioning:
        """Encode conditioning frames and the inputs of each sample (see Prompt.inputs).

        shape: shape of one sample's latents. Default: latent_shape.
        """
        conditioning: Conditioning = {}
        if any(inputs):
            conditioning |= self.model.encode_inputs(inputs, self.settings.num_frames, self.pixel_size(shape))
        if (frames := conditional_frames) is not None:
            conditioning = add_clean_frames(conditioning, frames.latents, frames.counts)
        return conditioning

    def pixel_size(self, shape: Sequence[int] | None) -> tuple[int, int]:
        """Return (height, width) in pixels. shape: shape of one sample's latents (default: latent_shape)."""
        size, (h, w) = self.settings, self.model.grid_size(self.latent_shape)
        height, width = (h, w) if shape is None else self.model.grid_size(shape)
        return height * size.height // h, width * size.width // w

    def decode_to_uint8(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Decode the latents of a batch. Return (samples, finite).

        samples: uint8 [batch, height, width, 3] for images, [batch, frames, height, width, 3] for videos.
        finite: one flag per sample. If a sample's latents contain non-finite values, its flag is False and the decoded
        sample must not be scored.
        """
        return self.start_decoding(latents).wait()

    @torch.no_grad()
    def start_decoding(self, latents: Tensor, rows: slice = slice(None)) -> PendingPixels:
        """Start decoding `latents[rows]`. On a GPU, decoding runs in parallel with work that is queued later.

        The result has a finiteness flag for every sample in `latents`, even for samples that are not decoded.
        """
        with run_on_decode_stream(self.model.device, latents) as done:
            finite_B = latents.flatten(1).isfinite().all(1)
            selected = torch.where(finite_B.view(-1, *[1] * (latents.ndim - 1)), latents, 0.0)[rows]
            parts = torch.split(selected, self.decode_batch_size(latents.shape[1:])) if len(selected) else ()
            # A non-blocking copy goes to pinned memory; on a CPU nothing is copied.
            levels = []
            for part in parts:
                pixels = self.model.quantize_pixels(self.model.decode_latents(part))
                levels.append(pixels.to("cpu", non_blocking=True))
            finite = finite_B.to("cpu", non_blocking=True)
        return PendingPixels(levels, finite, done)

    @torch.no_grad()
    def decode_sound(self, latents: Tensor) -> npt.NDArray[np.float32] | None:
        """Decode the sound of a batch, see DiffusionModel.decode_sound. None if the model has no sound.

        Samples with non-finite latents are silent.
        """
        if not self.model.makes_sound:
            return None
        is_finite = latents.flatten(1).isfinite().all(1).view(-1, *[1] * (latents.ndim - 1))
        sound = self.model.decode_sound(torch.where(is_finite, latents, 0.0))
        return None if sound is None else torch.where(is_finite.view(-1, 1, 1), sound, 0.0).cpu().numpy()

    def decode_batch_size(self, shape: Sequence[int]) -> int:
        """Return how many samples to decode together, so that decoding needs less memory than the denoiser.

        shape: shape of one sample's latents.
        """
        model, size = self.model, self.settings
        if model.device.type == "cpu" and not model.is_video:
            return 1
        frame = math.prod(self.pixel_size(shape))
        num_frames = vae.frames_per_decode(model.pipeline.vae, size.num_frames) if model.is_video else 1
        return vae.max_batch_size(model.pipeline.vae, frame * num_frames)


def negative_texts(model: DiffusionModel, settings: SamplingRecipe, prompts: Sequence[Prompt]) -> list[NegativeText]:
    """Return each prompt's own negative prompt or, if that is not set, the recipe's or else the family's default."""
    texts = [p.negative_text if p.negative_text is not None else settings.negative_prompt for p in prompts]
    return [NegativeText(model.resolve_negative_prompt(text)) for text in texts]
