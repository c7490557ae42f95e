"""Sampling in EDM coordinates with churn (arXiv 2206.00364, 2308.02157). DDRL samples Cosmos-Predict2.5 in this way.

The state is X = x0 + S*eps with the EDM noise level S. The denoiser receives x_sigma = X/(1 + S) with sigma = S/(1 +
S). The x0 prediction is D = x_sigma - sigma*velocity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wfm_ds.sampling.denoise import PredictVelocity, Trajectory, copy_noise_seeds
from wfm_ds.sampling.latents import draw_device_normal, require_latents
from wfm_ds.types import ConditioningFrames

EDM_SOLVERS = ("edm_2ab", "edm_euler")
HIGHEST_LEVEL, LOWEST_LEVEL, RHO = 200.0, 0.01, 7.0
MAX_CHURN = math.sqrt(1.2) - 1  # relative increase of a level
INITIAL_CHURN = -1  # step index used for the noise added to the initial state


def karras_levels(num_steps: int) -> list[float]:
    """Return num_steps + 1 noise levels S from 200 to 0.01, evenly spaced in S^(1/7) (arXiv 2206.00364, eq. 5)."""
    high, low = HIGHEST_LEVEL ** (1 / RHO), LOWEST_LEVEL ** (1 / RHO)
    return [(high + i / num_steps * (low - high)) ** RHO for i in range(num_steps + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Settings of churn, which adds noise before a denoising step.

    Churn raises a noise level in (min_level, max_level) by the factor 1 + relative.
    """

    relative: float
    min_level: float = 0.0
    max_level: float = math.inf
    noise_scale: float = 1.0  # factor on the standard deviation of the noise

    @classmethod
    def from_settings(cls, num_steps: int, *, s_churn: float, s_t_min: float, s_t_max: float, s_noise: float) -> Churn:
        """Create the churn for a rollout of `num_steps` steps from the keys of the recipe's section `sampling`.

        `relative` is s_churn / (num_steps + 1), but at most sqrt(1.2) - 1.
        """
        return cls(
            relative=min(s_churn / (num_steps + 1), MAX_CHURN),
            min_level=s_t_min,
            max_level=s_t_max,
            noise_scale=s_noise,
        )

    def raise_level(self, level: float) -> float:
        return level * (1 + self.relative) if self.min_level < level < self.max_level else level

    def noise_std(self, level: float) -> float:
        return self.noise_scale * math.sqrt(self.raise_level(level) ** 2 - level**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdmStep:
    """One denoising step, followed by the churn before the next step.

        mu = state_coef*X^ + clean_coef*D + previous_clean_coef*D'          next X^ = mu + std*z,  z ~ N(0, 1)

    X^ is the state after churn, with noise level S^. D is the x0 prediction at X^. D' is the x0 prediction of the
    previous step. The noise std*z is the churn before the next step.
    """

    level: float  # S^
    state_coef: float
    clean_coef: float
    previous_clean_coef: float = 0.0
    std: float  # 0 if no churn follows: the step is deterministic

    @property
    def sigma(self) -> float:
        return self.level / (1 + self.level)

    @property
    def gain(self) -> float:
        """Derivative of the step's mean with respect to the velocity, divided by the step's std. -inf if std is 0."""
        return -self.clean_coef * self.sigma / self.std if self.std > 0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EdmPlan:
    steps: tuple[EdmStep, ...]
    start_std: float  # std of the noise added to the initial state
    stored_steps: tuple[int, ...] = ()  # steps with stored denoiser inputs
    keep_means: ClassVar[bool] = False
    keep_states: ClassVar[bool] = True

    def trainable_steps(self) -> list[int]:
        """Return the indices of the stochastic steps, without the last step."""
        return [k for k, step in enumerate(self.steps) if step.std > 0]

    @torch.no_grad()
    def denoise(
        self,
        predict: PredictVelocity,
        noise: Tensor,
        seeds: Sequence[int],
        conditioning_frames: ConditioningFrames | None = None,
    ) -> Trajectory:
        """See SamplingPlan.denoise. Returns the x0 prediction at the last noise level, after all steps of the plan.

        The seeds must be in [0, 2**63). `conditioning_frames` is ignored, because the denoiser itself inserts these
        frames into its input and returns them as x0. Raises ValueError for noise of the wrong shape or dtype.
        """
        require_latents(noise=noise)
        noisy = [k for k in (INITIAL_CHURN, *range(len(self.steps))) if self._noise_std(k) > 0]
        keys = copy_noise_seeds(seeds, noisy, noise.device)

        def add_churn(state: Tensor, k: int) -> Tensor:
            return state + self._noise_std(k) * draw_device_normal(keys[k], state) if k in keys else state

        state, previous_clean = add_churn(HIGHEST_LEVEL * noise, INITIAL_CHURN), None
        states: dict[int, Tensor] = {}
        for k, step in enumerate(self.steps):
            latents, clean = predict_x0(predict, state, step.level)
            if k in self.stored_steps:
                states[k] = latents
            state = step.state_coef * state + step.clean_coef * clean
            if step.previous_clean_coef != 0:
                assert previous_clean is not None
                state = state + step.previous_clean_coef * previous_clean
            state, previous_clean = add_churn(state, k), clean
        return Trajectory(predict_x0(predict, state, LOWEST_LEVEL)[1], states=states)

    def _noise_std(self, k: int) -> float:
        return self.start_std if k == INITIAL_CHURN else self.steps[k].std


def predict_x0(predict: PredictVelocity, state: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return (flow-matching latents of an EDM state, x0 prediction at these latents)."""
    latents, sigma = state / (1 + level), level / (1 + level)
    return latents, latents - sigma * predict(latents, sigma)


def make_edm_plan(solver: str, num_steps: int, churn: Churn, *, stored_steps: Sequence[int] = ()) -> EdmPlan:
    """Return a sampling plan with the solver `edm_2ab` or `edm_euler`.

    `edm_2ab` is the RES multistep solver (two-step Adams-Bashforth in ln S, with the EDM noise level S). Raises
    ValueError for an unknown solver, for num_steps < 1, and if the churn is so large that noise levels do not decrease.
    """
    if solver not in EDM_SOLVERS or num_steps < 1:
        raise ValueError(f"EDM solver {solver!r} with {num_steps} steps: use {' or '.join(EDM_SOLVERS)} and at least 1")
    levels = karras_levels(num_steps)
    step_levels = [churn.raise_level(level) for level in levels[:-1]]
    if any(start <= end for start, end in itertools.pairwise(step_levels)):
        raise ValueError(f"{num_steps} steps, churn {churn.relative:.4f}: noise levels do not decrease: {step_levels}")
    steps = []
    for k, level in enumerate(step_levels):
        h = math.log(level / levels[k + 1])
        decay_gain = -math.expm1(-h)  # 1 - e^-h
        now = decay_gain
        if k > 0 and solver == "edm_2ab":
            now += h / math.log(step_levels[k - 1] / level) * (1 - decay_gain / h)
        # The noise of step k raises S_{k+1}. The last level gets no noise, because the prediction there is the result.
        std = churn.noise_std(levels[k + 1]) if k + 1 < num_steps else 0.0
        steps.append(
            EdmStep(level=level, state_coef=math.exp(-h), clean_coef=now, previous_clean_coef=decay_gain - now, std=std)
        )
    return EdmPlan(steps=tuple(steps), start_std=churn.noise_std(levels[0]), stored_steps=tuple(stored_steps))
