"""From prompts and noise seeds to images or videos: what rollouts, validation and `wfm_ds.generate` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.models.text_cache import TextCache
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.denoise import Plan, Trajectory
from wfm_ds.sampling.noise import seeded_normal
from wfm_ds.sampling.plan import deterministic_plan
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames, Conditioning


class Velocity(Protocol):
    """One forward: DiffusionModel.denoise, or something that counts it too."""

    def __call__(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None, /) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A model with the sizes and the guidance of a recipe's `sampling` section. It computes with the weights in use."""

    model: DiffusionModel
    texts: TextCache
    settings: SamplingRecipe

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C,h,w) or (C,T,h,w). Raises ValueError for a size that the family cannot make."""
        size = self.settings
        return self.model.latent_shape(size.height, size.width, size.num_frames)

    def evaluation_plan(self) -> Plan:
        """Deterministic, whatever the rollouts do. Raises ModelError for a grid that the scheduler cannot make."""
        return deterministic_plan("ode", self.model.sigmas(self.settings.eval_steps, self.latent_shape))

    def generate(
        self,
        prompts: Sequence[Prompt],
        noise_seeds: Sequence[int],
        plan: Plan,
        *,
        seeds: Sequence[int] | None = None,
        conditional_frames: ConditionalFrames | None = None,
        shape: tuple[int, ...] | None = None,
        velocity: Velocity | None = None,
    ) -> Trajectory:
        """Denoise B samples as planned. noise_seeds: of the initial noise; seeds: of what the plan draws besides,
        unless they are the same. shape: of one sample's latents, unless latent_shape. velocity: the forward to use, if
        not the model's own."""
        conditioning, contrast = self.conditionings(prompts, conditional_frames)

        def predict(latents: Tensor, sigma: float) -> Tensor:
            sigma_B = torch.full((len(latents),), sigma, dtype=torch.float32, device=latents.device)
            expert = self.model.expert_of(sigma)
            return self.guided(velocity or self.model.denoise, latents, sigma_B, conditioning, contrast, expert)

        noise = seeded_normal(noise_seeds, shape or self.latent_shape, self.model.device)
        return plan.run(predict, noise, noise_seeds if seeds is None else seeds)

    def guided(
        self,
        velocity: Velocity,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        contrast: Conditioning | None,
        expert: int | None = None,
        *,
        contrast_velocity: Velocity | None = None,
    ) -> Tensor:
        """`velocity`, guided by the scale of `expert` away from `contrast` (see unconditional; None: not
        guided), whose forward may be another one; without it where that scale is 1. Gradient flows through the
        conditional half only."""
        conditional = velocity(latents, sigma, conditioning, expert)
        scale = self.settings.guidance_of(expert or 0)
        if contrast is None or scale == 1:
            return conditional
        with torch.no_grad():
            unconditional = (contrast_velocity or velocity)(latents, sigma, contrast, expert)
        return self.model.combine_guidance(conditional, unconditional, scale)

    def conditionings(
        self, prompts: Sequence[Prompt], conditional_frames: ConditionalFrames | None = None
    ) -> tuple[Conditioning, Conditioning | None]:
        """What the denoiser is told about these samples, and what guidance contrasts it with: see unconditional. Both
        hold the conditional frames."""
        conditioning = self.texts.encode([prompt.text for prompt in prompts])
        contrast = self.unconditional(prompts)
        if conditional_frames is None:
            return conditioning, contrast
        if contrast is not None:
            contrast = with_conditional_frames(contrast, conditional_frames.latents, conditional_frames.counts)
        return with_conditional_frames(conditioning, conditional_frames.latents, conditional_frames.counts), contrast

    def unconditional(self, prompts: Sequence[Prompt]) -> Conditioning | None:
        """What guidance contrasts each prompt with: its own negative text, else the recipe's, else the family's. None
        when the guidance scale is 1."""
        settings = self.settings
        if settings.guidance_scale == 1:
            return None
        return self.texts.encode(negatives(self.model, settings, prompts))

    def media(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """uint8 [B,H,W,3] of these latents, of video families [B,T,H,W,3], and whether each was finite: one that was
        not is shown as mid-grey latents and must not be scored."""
        finite = finite_samples(latents)
        shown = torch.stack([row if ok else torch.zeros_like(row) for row, ok in zip(latents, finite, strict=True)])
        # One sample after the other: decoded at once, a batch of them needs more memory than the denoiser.
        parts = [self.model.to_uint8(self.model.decode(part)) for part in torch.split(shown, 1)]
        return np.concatenate(parts), finite


def finite_samples(latents: Tensor) -> list[bool]:
    """Of each sample of [B, ...], whether all of it is finite."""
    finite: list[bool] = latents.flatten(1).isfinite().all(1).tolist()
    return finite


def negatives(model: DiffusionModel, settings: SamplingRecipe, prompts: Sequence[Prompt]) -> list[NegativeText]:
    """The texts that guidance contrasts these prompts with."""
    texts = [p.negative_text if p.negative_text is not None else settings.negative_prompt for p in prompts]
    return [NegativeText(model.null_text(text)) for text in texts]
