"""The denoising loop, for every model family and algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from wfm_ds.sampling.latents import LATENT_NDIMS, StreamWeights, free_frame_mask, sample_mean
from wfm_ds.seeds import derive_seed
from wfm_ds.tensor_memory import copy_to_device
from wfm_ds.types import ConditioningFrames
from wfm_kernels import sde_log_prob, sde_step

PredictVelocity: TypeAlias = Callable[[Tensor, float], Tensor]
"""Function: (latents [B, ...], noise level) -> velocity eps - x0, float32. Includes the rollout's guidance."""
LOG_PROB_SCALE, LOG_PROB_OFFSET = 3, 4  # columns of wfm_kernels.sde_coefficients


@dataclass(frozen=True, slots=True)
class StoredStep:
    """One stochastic denoising step of B samples. Tensors are float32 and detached."""

    index: int  # step index in the plan
    latents: Tensor  # [B, ...] before the step
    next_latents: Tensor  # [B, ...] after the step
    log_prob: Tensor  # [B]
    mean: Tensor | None  # [B, ...] mean of the Gaussian that next_latents was drawn from; None unless plan.keep_means
    passes: Mapping[str, Tensor] = field(default_factory=dict)  # {guidance pass: velocity [B, ...]}; set by the sampler


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Result of a rollout of B samples: clean latents [B, ...] float32 and the stored steps."""

    clean_latents: Tensor
    stored_steps: list[StoredStep] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)  # {step: denoiser input}; empty unless plan.keep_states
    predictions: dict[int, Tensor] = field(default_factory=dict)  # {step: x - sigma*v}; empty unless kept by plan


class SamplingPlan(Protocol):
    """Plan of a rollout: solver, noise levels, stochastic steps and stored steps."""

    @property
    def stored_steps(self) -> tuple[int, ...]:
        """Indices of the steps stored for training."""

    @property
    def keep_means(self) -> bool:
        """Whether each stored step includes the mean of the Gaussian from which the next latents were drawn."""

    @property
    def keep_states(self) -> bool:
        """Whether `Trajectory.states` contains input latents of the denoiser.

        EDM plans keep the inputs of the stored steps, flow-matching plans the inputs of all steps.
        """

    def denoise(
        self,
        predict: PredictVelocity,
        noise: Tensor,
        seeds: Sequence[int],
        conditioning_frames: ConditioningFrames | None = None,
    ) -> Trajectory:
        """Denoise float32 noise [B,N], [B,C,h,w] or [B,C,T,h,w].

        predict: returns velocities; it must use the same conditioning frames. seeds: one per sample, for the noise of
        stochastic steps. Does not synchronize with the device between the first and the last forward pass.
        """


@dataclass(frozen=True, slots=True)
class SolverStep:
    """One denoising step from s = sigma to s' = sigma_next, with the velocity v and x0_hat = x - s*v at s:

        x' = x + (s'-s)*v + correction*(x0_hat - previous x0_hat)

    Euler steps have correction = 0. In exact arithmetic, the formula equals the DPM-Solver++ form

        x' = (s'/s)*x + (1-s'/s)*x0_hat + correction*(x0_hat - previous x0_hat)
    """

    sigma: float
    sigma_next: float
    correction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlan:
    """A sampling plan of N steps in flow-matching coordinates."""

    steps: tuple[SolverStep, ...]
    table: Tensor  # [N,5] float64 on the CPU, from wfm_kernels.sde_coefficients
    noisy_steps: tuple[int, ...] = ()  # indices of the steps that add noise
    stored_steps: tuple[int, ...] = ()  # subset of `noisy_steps` that is stored for training
    keep_means: bool = False
    keep_states: bool = False
    keep_predictions: bool = False  # whether to keep the clean latents that each step predicts
    stream_weights: StreamWeights | None = None  # of log-probabilities; None: all elements have equal weights

    @property
    def trainable_noisy_steps(self) -> tuple[int, ...]:
        """Indices of the noisy steps, without the last step of the plan."""
        return tuple(k for k in self.noisy_steps if k < len(self.steps) - 1)

    @torch.no_grad()
    def denoise(
        self,
        predict: PredictVelocity,
        noise: Tensor,
        seeds: Sequence[int],
        conditioning_frames: ConditioningFrames | None = None,
    ) -> Trajectory:
        """See SamplingPlan.denoise. The seeds must be in [0, 2**63).

        Conditioning frames stay unchanged, and log-probabilities exclude them. Raises ValueError if the noise has the
        wrong shape or dtype.
        """
        if noise.ndim not in LATENT_NDIMS or noise.dtype != torch.float32:
            raise ValueError(
                f"noise must be [B,N], [B,C,h,w] or [B,C,T,h,w] float32, got {list(noise.shape)} {noise.dtype}"
            )
        # Copy once, before the loop. Copies from pageable memory would wait for all work that the device has queued.
        table = copy_to_device(self.table, noise.device)
        noise_seeds = copy_noise_seeds(seeds, self.noisy_steps, noise.device)
        multistep = any(step.correction for step in self.steps)
        mask = None if conditioning_frames is None else free_frame_mask(conditioning_frames)
        weights = mask if self.stream_weights is None else self.stream_weights.element_weights(noise.device)

        def restore_frames(latents: Tensor) -> Tensor:
            return (
                latents
                if conditioning_frames is None or mask is None
                else torch.where(mask > 0, latents, conditioning_frames.latents)
            )

        latents, previous_clean, stored = restore_frames(noise), None, list[StoredStep]()
        states, predictions = dict[int, Tensor](), dict[int, Tensor]()
        for k, step in enumerate(self.steps):
            velocity, row = predict(latents, step.sigma), table[k].expand(len(latents), -1)
            clean = latents - step.sigma * velocity if multistep or self.keep_predictions else None
            if self.keep_states:
                states[k] = latents
            if clean is not None and self.keep_predictions:
                predictions[k] = clean
            if k in noise_seeds:
                is_stored = k in self.stored_steps
                out = sde_step(velocity, latents, row, seeds=noise_seeds[k], return_mean=is_stored and self.keep_means)
                next_latents, log_prob = restore_frames(out.next_latents), out.log_prob
                if is_stored:
                    if weights is not None:
                        log_prob = transition_log_prob(velocity, latents, next_latents, row, weights)
                    stored.append(StoredStep(k, latents, next_latents, log_prob, out.mean))
            else:
                # The std of this step is 0, so any finite tensor of the right shape can be passed as noise.
                next_latents = restore_frames(sde_step(velocity, latents, row, noise=latents).next_latents)
            latents = next_latents
            if step.correction != 0.0:
                assert clean is not None
                assert previous_clean is not None
                latents = latents + step.correction * (clean - previous_clean)
            previous_clean = clean
        return Trajectory(latents, stored, states, predictions)


def step_noise_seeds(seeds: Sequence[int], step: int) -> Tensor:
    """Return the seed of each sample's noise at this step, [B] int64 on the CPU. seeds: one per sample."""
    return torch.tensor([derive_seed(seed, "sde_noise", step) for seed in seeds], dtype=torch.int64)


def copy_noise_seeds(seeds: Sequence[int], steps: Sequence[int], device: torch.device) -> dict[int, Tensor]:
    """Return {step: `step_noise_seeds` on the device}. All steps share one asynchronous copy."""
    if not steps:
        return {}
    rows = torch.stack([step_noise_seeds(seeds, step) for step in steps])
    return dict(zip(steps, copy_to_device(rows, device).unbind(), strict=True))


def transition_mean(velocity: Tensor, latents: Tensor, coefficients: Tensor) -> Tensor:
    """Return the mean of the next latents, c_x * latents + c_v * velocity: [B, ...].

    coefficients: rows of FlowPlan.table, [B,5] float64. The first two columns are c_x and c_v.
    """
    c_x, c_v = (coefficients[:, i].to(latents.dtype).view(-1, *[1] * (latents.ndim - 1)) for i in (0, 1))
    return c_x * latents + c_v * velocity


def transition_log_prob(
    velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probability [B] of the next latents, averaged over the elements of each sample.

    Latents and velocity: [B, ...]; gradients flow to the velocity. coefficients: rows of FlowPlan.table, [B,5] float64.
    mask: as in sample_mean. Equal velocities give bit-identical results in rollout and training.
    """
    if mask is None:
        return sde_log_prob(velocity, latents, next_latents, coefficients)
    error = sample_mean((next_latents - transition_mean(velocity, latents, coefficients)).square(), mask)
    return (coefficients[:, LOG_PROB_OFFSET] - coefficients[:, LOG_PROB_SCALE] * error.double()).to(latents.dtype)
