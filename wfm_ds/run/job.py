"""What every training loop works with, built once per run. No loop and no algorithm in here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.distributed.lifecycle import StopFlag
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine
from wfm_ds.models.base import DiffusionModel
from wfm_ds.models.latent_cache import LatentCache
from wfm_ds.models.sampler import Sampler, finite_samples
from wfm_ds.models.text_cache import TextCache
from wfm_ds.monitoring.meter import Stopwatch
from wfm_ds.monitoring.monitor import Monitor
from wfm_ds.recipe.derived import Derived
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.mirror import Mirror
from wfm_ds.sampling.denoise import Plan, Trajectory
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    from wfm_ds.data.pixels import Framing
    from wfm_ds.data.samples import Media
    from wfm_ds.types import ConditionalFrames, Conditioning

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """One run on one rank."""

    recipe: Recipe
    derived: Derived
    world: World
    stop: StopFlag
    model: DiffusionModel
    engine: DenoiserEngine
    texts: TextCache
    latents: LatentCache | None = None  # of training media, if they are kept
    monitor: Monitor
    mirror: Mirror | None = None  # rank 0's, if the run is copied to a storage
    timer: Stopwatch = field(default_factory=Stopwatch)
    forwards: Counter[str] = field(default_factory=Counter)  # of this rank since the last metrics, by purpose

    @property
    def sampler(self) -> Sampler:
        return Sampler(model=self.model, texts=self.texts, settings=self.recipe.sampling)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.sampler.latent_shape

    @property
    def cached_latents(self) -> Callable[[Media, Framing], Tensor | None] | None:
        """The kept latents of a medium, for a source of batches; None if the run keeps none."""
        return None if self.latents is None else self.latents.read

    @property
    def evaluation_policy(self) -> str:
        """The weights that are validated, shown and exported."""
        return "ema" if self.recipe.ema is not None else "train"

    def velocity(
        self, purpose: str, latents: Tensor, sigma: Tensor, conditioning: Conditioning, expert: int | None = None
    ) -> Tensor:
        """One counted denoiser forward under the engine's active policy: float32, shape of the latents. `expert`: the
        expert that all of sigma belong to."""
        self.forwards[purpose] += 1
        # Height and width are a replica's own where media have several sizes.
        shape = latents.shape if self.recipe.data.buckets is None else latents.shape[:-2]
        what = (self.engine.active, torch.is_grad_enabled(), tuple(shape), expert)
        self.engine.guard_check(*what, inputs=(latents, sigma, *conditioning.values()))
        return self.model.denoise(latents, sigma, conditioning, expert)

    def guided_velocity(
        self,
        purpose: str,
        latents: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        contrast: Conditioning | None,
        expert: int | None = None,
        *,
        contrast_purpose: str = "uncond",
    ) -> Tensor:
        """`velocity`, guided by the recipe's scale away from `contrast` (Sampler.guided)."""
        return self.sampler.guided(
            partial(self.velocity, purpose),
            latents,
            sigma,
            conditioning,
            contrast,
            expert,
            contrast_velocity=partial(self.velocity, contrast_purpose),
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        noise_seeds: Sequence[int],
        plan: Plan,
        *,
        purpose: str,
        seeds: Sequence[int] | None = None,
        conditional_frames: ConditionalFrames | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Trajectory:
        """Denoise B samples as planned, under the engine's active policy (Sampler.generate)."""
        velocity = partial(self.velocity, purpose)
        return self.sampler.generate(
            prompts,
            noise_seeds,
            plan,
            seeds=seeds,
            conditional_frames=conditional_frames,
            shape=shape,
            velocity=velocity,
        )

    def conditionings(
        self, prompts: Sequence[Prompt], conditional_frames: ConditionalFrames | None = None
    ) -> tuple[Conditioning, Conditioning | None]:
        """What the denoiser is told about these samples, and what guidance contrasts with it (Sampler)."""
        return self.sampler.conditionings(prompts, conditional_frames)

    def media(self, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """uint8 [B,H,W,3] or [B,T,H,W,3] of these latents, and whether each was finite (Sampler.media). Only leaders
        decode: the other ranks of a replica get none, [0]."""
        if not self.world.is_leader:
            return np.empty(0, np.uint8), finite_samples(latents)
        return self.sampler.media(latents)

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; collective, called once per step by all."""
        return self.world.any(self.stop.is_set)
