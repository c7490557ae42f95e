"""Images or videos from prompts and noise seeds: the part that rollouts, validation and `wfm_ds.generate` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.engine.forward import Forward
from wfm_ds.errors import RecipeError
from wfm_ds.models import vae
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.captions import Text, captioned
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.models.decoding import Decoding, beside
from wfm_ds.models.text_cache import TextCache
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.denoise import Plan, Trajectory
from wfm_ds.sampling.noise import seeded_normal
from wfm_ds.sampling.plan import deterministic_plan
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames, Conditioning

UNCONDITIONAL = "uncond"  # the purpose of forwards that guidance contrasts with; those of a rollout are rollout


@dataclass(frozen=True, slots=True)
class Conditions:
    """The inputs of the denoiser about B samples, and those that guidance contrasts them with."""

    conditioning: Conditioning
    contrast: Conditioning | None  # None: no expert is guided

    def both(self, model: DiffusionModel) -> Conditioning:
        """The rows of both, one after the other. Raises RecipeError where they cannot share a batch."""
        assert self.contrast is not None
        try:
            return model.stack([self.conditioning, self.contrast])
        except ValueError as error:
            raise RecipeError(
                f"sampling.guidance_batch: joint needs both texts in one shape, and {error}: set it to separate"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A model with the sizes and the guidance of a recipe's `sampling` section. It computes with the weights in use."""

    model: DiffusionModel
    texts: TextCache
    settings: SamplingRecipe
    forward: Forward
    joint_rows: Mapping[str, int] = field(default_factory=dict)
    """By purpose of `generate`, the rows of the largest forward that holds both halves of guided predictions; of other
    purposes each half has a forward of its own."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C,h,w) or (C,T,h,w). Raises ValueError for a size that the family cannot make."""
        size = self.settings
        return self.model.latent_shape(size.height, size.width, size.num_frames)

    def evaluation_plan(self) -> Plan:
        """Deterministic, whatever the rollouts do. Raises ModelError for a grid that the scheduler cannot make."""
        return deterministic_plan(self.eval_solver, self.model.sigmas(self.settings.eval_steps, self.latent_shape))

    @property
    def eval_solver(self) -> str:
        """The solver of validation and of `wfm_ds.generate`: the recipe's, else of the order that the pipeline's is."""
        return self.settings.eval_solver or self.model.stock_solver

    def generate(
        self,
        purpose: str,
        prompts: Sequence[Prompt],
        noise_seeds: Sequence[int],
        plan: Plan,
        *,
        seeds: Sequence[int] | None = None,
        conditional_frames: ConditionalFrames | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Trajectory:
        """Denoise B samples as planned.

        noise_seeds: of the initial noise. seeds: of what the plan draws besides, unless they are the same. shape: of
        one sample's latents, unless latent_shape.
        """
        conditions = self.conditions(prompts, conditional_frames, shape)
        joint = 2 * len(prompts) <= self.joint_rows.get(purpose, 0)

        def predict(latents: Tensor, sigma: float) -> Tensor:
            sigma_B = torch.full((len(latents),), sigma, dtype=torch.float32, device=latents.device)
            expert = self.model.expert_of(sigma)
            if joint and self.settings.is_guided(expert):
                return self.joint_velocity(purpose, latents, sigma_B, conditions, expert)
            return self.velocity(purpose, latents, sigma_B, conditions, expert, contrast_purpose=purpose)

        noise = seeded_normal(noise_seeds, shape or self.latent_shape, self.model.device)
        return plan.run(predict, noise, noise_seeds if seeds is None else seeds, conditional_frames)

    def velocity(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditions: Conditions,
        expert: int,
        *,
        contrast_purpose: str = UNCONDITIONAL,
    ) -> Tensor:
        """Predict [B, ...] float32 with one expert, guided where it is. Gradient flows through the conditional half
        only. contrast_purpose: what the other half is counted as."""
        conditional = self.forward(purpose, latents, sigma, conditions.conditioning, expert)
        if conditions.contrast is None or not self.settings.is_guided(expert):
            return conditional
        with torch.no_grad():
            unconditional = self.forward(contrast_purpose, latents, sigma, conditions.contrast, expert)
        return self.model.combine_guidance(conditional, unconditional, self.settings.guidance_of(expert))

    def joint_velocity(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditions: Conditions, expert: int
    ) -> Tensor:
        """Return what `velocity` does of a guided expert, but for rounding, by one forward of 2 B rows."""
        both = torch.cat([latents] * 2), torch.cat([sigma] * 2), conditions.both(self.model)
        conditional, unconditional = self.forward(purpose, *both, expert).chunk(2)
        return self.model.combine_guidance(conditional, unconditional, self.settings.guidance_of(expert))

    def conditions(
        self,
        prompts: Sequence[Prompt],
        conditional_frames: ConditionalFrames | None = None,
        shape: Sequence[int] | None = None,
    ) -> Conditions:
        """The embedded prompts and, where an expert is guided, what they are contrasted with: each prompt's own
        negative text, else the recipe's, else the family's. Both hold the prompts' inputs and the conditional frames.

        shape: of one sample's latents, unless latent_shape."""
        texts: list[Sequence[Text]] = [[prompt.text for prompt in prompts]]
        if self.settings.is_guided():
            texts.append(negatives(self.model, self.settings, prompts))
        embedded = [self.texts.encode(self.captioned(part, shape)) for part in texts]
        besides = self.besides_text([prompt.inputs for prompt in prompts], conditional_frames, shape)
        told = [{**text, **besides} for text in embedded]
        return Conditions(told[0], told[1] if len(told) == 2 else None)

    def captioned(self, texts: Sequence[Text], shape: Sequence[int] | None = None) -> list[Text]:
        """These texts as the family encodes them, for latents of this shape, unless latent_shape."""
        return captioned(self.model, texts, self.pixel_size(shape), self.settings.num_frames)

    def besides_text(
        self,
        inputs: Sequence[Mapping[str, npt.NDArray[np.float32]]],
        conditional_frames: ConditionalFrames | None,
        shape: Sequence[int] | None = None,
    ) -> Conditioning:
        """The conditioning [B, ...] of samples besides their texts: what data.inputs names, and the frames that they
        are given. The only place where it is made, for training and sampling alike. shape: see `conditions`."""
        found: Conditioning = {}
        if any(inputs):
            found |= self.model.encode_inputs(inputs, self.settings.num_frames, self.pixel_size(shape))
        if (frames := conditional_frames) is not None:
            found = with_conditional_frames(found, frames.latents, frames.counts)
        return found

    def pixel_size(self, shape: Sequence[int] | None) -> tuple[int, int]:
        """Height and width of the pixels of latents of this shape, unless latent_shape."""
        size, (*_, h, w) = self.settings, self.latent_shape
        height, width = (h, w) if shape is None else shape[-2:]
        return height * size.height // h, width * size.width // w

    def media(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """uint8 [B,H,W,3] of these latents, of video families [B,T,H,W,3], and whether each was finite: one that was
        not is shown as mid-grey latents and must not be scored."""
        return self.decoding(latents).wait()

    @torch.no_grad()
    def decoding(self, latents: Tensor, rows: slice = slice(None)) -> Decoding:
        """Begin what `media` waits for, of these rows alone (finite or not: of all). On a GPU it goes on beside what is
        denoised afterwards."""
        with beside(self.model.device, latents) as done:
            finite_B = latents.flatten(1).isfinite().all(1)
            shown = torch.where(finite_B.view(-1, *[1] * (latents.ndim - 1)), latents, 0.0)[rows]
            parts = torch.split(shown, self.decode_batch(latents.shape[1:])) if len(shown) else ()
            # A copy that does not block goes into pinned memory; on a CPU there is nothing to copy.
            levels = [self.model.levels(self.model.decode(part)).to("cpu", non_blocking=True) for part in parts]
            finite = finite_B.to("cpu", non_blocking=True)
        return Decoding(levels, finite, done)

    def decode_batch(self, shape: Sequence[int]) -> int:
        """Number of samples with latents of this shape to decode at once: small ones together, pictures on a CPU one by
        one.

        All samples of a batch would need more memory than the denoiser, a small one alone leaves a device idle.
        """
        model, size, (*_, h, w) = self.model, self.settings, self.latent_shape
        if model.device.type == "cpu" and not model.video:
            return 1
        frame = shape[-2] * shape[-1] * (size.height // h) * (size.width // w)
        at_once = vae.frames_at_once(model.pipeline.vae, size.num_frames) if model.video else 1
        return vae.media_at_once(model.pipeline.vae, frame * at_once)


def negatives(model: DiffusionModel, settings: SamplingRecipe, prompts: Sequence[Prompt]) -> list[NegativeText]:
    """The texts that guidance contrasts these prompts with."""
    texts = [p.negative_text if p.negative_text is not None else settings.negative_prompt for p in prompts]
    return [NegativeText(model.null_text(text)) for text in texts]
