"""The denoise loop: from noise to clean latents as a plan says. Knows no family, no guidance and no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from wfm_ds.sampling.schedule import SolverStep
from wfm_ds.sampling.shapes import free_frames
from wfm_ds.sampling.transition import transition_log_prob
from wfm_ds.seeds import derive_seed
from wfm_kernels import sde_step

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames

Predict: TypeAlias = Callable[[Tensor, float], Tensor]
"""The velocity eps - x0, float32, of latents [B, ...] at one noise level; guided, if the rollout is."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Record of one stochastic step; float32, detached."""

    index: int  # of the step in its plan
    latents: Tensor  # [B, ...] before it
    next_latents: Tensor  # [B, ...] after it
    log_prob: Tensor  # [B]
    mean: Tensor | None  # [B, ...] of the Gaussian that next_latents was drawn from, if the plan keeps it


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Result of a rollout of B samples: clean latents, float32, shape of the noise, and the plan's stored steps."""

    clean: Tensor
    stored: list[StoredStep] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)  # by step: what the denoiser saw; some plans keep only that


class Plan(Protocol):
    """Choices about a rollout, made before it starts: solver, grid, where noise enters, what is stored."""

    @property
    def stored(self) -> tuple[int, ...]:
        """The steps that are kept for training."""

    @property
    def keep_means(self) -> bool:
        """Keep the means of their Gaussians too."""

    @property
    def keep_states(self) -> bool:
        """Keep of a step what the denoiser saw, and nothing else."""

    def run(
        self, predict: Predict, noise: Tensor, seeds: Sequence[int], given: ConditionalFrames | None = None
    ) -> Trajectory:
        """Denoise [B,C,h,w] or [B,C,T,h,w] float32 noise. What else is drawn follows from each sample's seed alone, and
        nothing waits for the device between the first forward and the last. given: the frames that `predict` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlan:
    """N steps on the flow's grid; sampling/plan.py makes them."""

    steps: tuple[SolverStep, ...]
    table: Tensor  # [N,5] float64 on the CPU: rows of wfm_kernels.sde_coefficients
    noisy: tuple[int, ...] = ()  # steps that add noise
    stored: tuple[int, ...] = ()  # those of them that are kept for training
    keep_means: bool = False
    keep_states: ClassVar[bool] = False

    @torch.no_grad()
    def run(
        self, predict: Predict, noise: Tensor, seeds: Sequence[int], given: ConditionalFrames | None = None
    ) -> Trajectory:
        """See Plan.run. `seeds` [B] in [0, 2**63). ValueError for a noise that is not float32 latents.

        Given frames hold their latents from the first step to the last: no noise is drawn on them, and they are no part
        of a log-probability.
        """
        if noise.ndim not in (4, 5) or noise.dtype != torch.float32:
            raise ValueError(f"noise must be [B,C,h,w] or [B,C,T,h,w] float32, got {list(noise.shape)} {noise.dtype}")
        # Once per rollout, not in the loop: a copy may wait for the device.
        table = self.table.to(noise.device)
        noise_seeds = {k: step_seeds(seeds, k).to(noise.device) for k in self.noisy}
        multistep = any(step.correction for step in self.steps)
        free = None if given is None else free_frames(given)

        def held(latents: Tensor) -> Tensor:
            return latents if given is None or free is None else torch.where(free > 0, latents, given.latents)

        latents, clean_before, stored = held(noise), None, list[StoredStep]()
        for k, step in enumerate(self.steps):
            velocity, row = predict(latents, step.sigma), table[k].expand(len(latents), -1)
            clean = latents - step.sigma * velocity if multistep else None
            if k in noise_seeds:
                keep = k in self.stored
                out = sde_step(velocity, latents, row, seeds=noise_seeds[k], return_mean=keep and self.keep_means)
                after, log_prob = held(out.next_latents), out.log_prob
                if keep:
                    if free is not None:
                        log_prob = transition_log_prob(velocity, latents, after, row, free)
                    stored.append(StoredStep(k, latents, after, log_prob, out.mean))
            else:
                # The row's noise has std 0, so any finite tensor of the right shape serves as noise.
                after = held(sde_step(velocity, latents, row, noise=latents).next_latents)
            latents = after
            if step.correction != 0.0:
                assert clean is not None
                assert clean_before is not None
                latents = latents + step.correction * (clean - clean_before)
            clean_before = clean
        return Trajectory(latents, stored)


def step_seeds(seeds: Sequence[int], index: int) -> Tensor:
    """[B] int64 on the CPU: seeds of the noise that these samples get at that step (wfm_kernels' noise contract)."""
    return torch.tensor([derive_seed(seed, "sde_noise", index) for seed in seeds], dtype=torch.int64)
