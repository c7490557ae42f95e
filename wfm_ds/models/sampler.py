"""From prompts and noise seeds to images or videos: what rollouts, validation and `wfm_ds.generate` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.engine.forward import Forward
from wfm_ds.models import vae
from wfm_ds.models.base import DiffusionModel, NegativeText
from wfm_ds.models.conditional_frames import with_conditional_frames
from wfm_ds.models.text_cache import TextCache
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.denoise import Plan, Trajectory
from wfm_ds.sampling.noise import seeded_normal
from wfm_ds.sampling.plan import evaluation_plan
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames, Conditioning

DECODED_PIXELS = 2**20  # of videos at once, unless one has more: as many as a picture of 1024 x 1024
UNCONDITIONAL = "uncond"  # the purpose of forwards that guidance contrasts with; those of a rollout are rollout


@dataclass(frozen=True, slots=True)
class Conditions:
    """The inputs of the denoiser about B samples, and those that guidance contrasts them with."""

    conditioning: Conditioning
    contrast: Conditioning | None  # None: no expert is guided


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A model with the sizes and the guidance of a recipe's `sampling` section. It computes with the weights in use."""

    model: DiffusionModel
    texts: TextCache
    settings: SamplingRecipe
    forward: Forward

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C,h,w) or (C,T,h,w). Raises ValueError for a size that the family cannot make."""
        size = self.settings
        return self.model.latent_shape(size.height, size.width, size.num_frames)

    def evaluation_plan(self) -> Plan:
        """Deterministic, whatever the rollouts do. Raises ModelError for a grid that the scheduler cannot make."""
        return evaluation_plan(self.eval_solver, self.model.sigmas(self.settings.eval_steps, self.latent_shape))

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
        conditions = self.conditions(prompts, conditional_frames)

        def predict(latents: Tensor, sigma: float) -> Tensor:
            sigma_B = torch.full((len(latents),), sigma, dtype=torch.float32, device=latents.device)
            expert = self.model.expert_of(sigma)
            return self.velocity(purpose, latents, sigma_B, conditions, expert, contrast_purpose=purpose)

        noise = seeded_normal(noise_seeds, shape or self.latent_shape, self.model.device)
        return plan.run(predict, noise, noise_seeds if seeds is None else seeds)

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

    def conditions(self, prompts: Sequence[Prompt], conditional_frames: ConditionalFrames | None = None) -> Conditions:
        """The embedded prompts and, where an expert is guided, what they are contrasted with: each prompt's own
        negative text, else the recipe's, else the family's. Both hold the conditional frames."""
        told = [self.texts.encode([prompt.text for prompt in prompts])]
        if self.settings.is_guided():
            told.append(self.texts.encode(negatives(self.model, self.settings, prompts)))
        if (frames := conditional_frames) is not None:
            told = [with_conditional_frames(each, frames.latents, frames.counts) for each in told]
        return Conditions(told[0], told[1] if len(told) == 2 else None)

    def media(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """uint8 [B,H,W,3] of these latents, of video families [B,T,H,W,3], and whether each was finite: one that was
        not is shown as mid-grey latents and must not be scored."""
        finite = finite_samples(latents)
        shown = torch.stack([row if ok else torch.zeros_like(row) for row, ok in zip(latents, finite, strict=True)])
        parts = torch.split(shown, self.decode_batch(latents.shape[1:]))
        return np.concatenate([self.model.to_uint8(self.model.decode(part)) for part in parts]), finite

    def decode_batch(self, shape: Sequence[int]) -> int:
        """How many samples with latents of this shape are decoded at once: pictures one by one, small videos together.

        All videos of a batch would need more memory than the denoiser, a small one alone leaves a device idle.
        """
        if not self.model.video:
            return 1
        size, (*_, h, w) = self.settings, self.latent_shape
        frame = shape[-2] * shape[-1] * (size.height // h) * (size.width // w)
        return max(1, DECODED_PIXELS // (frame * vae.frames_at_once(self.model.pipeline.vae, size.num_frames)))


def finite_samples(latents: Tensor) -> list[bool]:
    """For each sample of [B, ...], say whether all of it is finite."""
    finite: list[bool] = latents.flatten(1).isfinite().all(1).tolist()
    return finite


def negatives(model: DiffusionModel, settings: SamplingRecipe, prompts: Sequence[Prompt]) -> list[NegativeText]:
    """The texts that guidance contrasts these prompts with."""
    texts = [p.negative_text if p.negative_text is not None else settings.negative_prompt for p in prompts]
    return [NegativeText(model.null_text(text)) for text in texts]
