"""Rollouts in EDM coordinates with churn, as DDRL samples Cosmos-Predict2.5 (arXiv 2206.00364, 2308.02157).

The state is X = x0 + S*eps at a level S between 200 and 0.01: the flow's x_sigma = X/(1 + S) at sigma = S/(1 + S). So
the denoiser is the ordinary one, and D = x_sigma - sigma*velocity its x0_hat.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from wfm_ds.sampling.denoise import Predict, Trajectory, step_seeds
from wfm_ds.sampling.noise import drawn_normal
from wfm_ds.sampling.shapes import require_latents

if TYPE_CHECKING:
    from wfm_ds.types import ConditionalFrames

SOLVERS = ("edm_2ab", "edm_euler")
HIGHEST_LEVEL, LOWEST_LEVEL, RHO = 200.0, 0.01, 7.0
MAX_CHURN = math.sqrt(1.2) - 1  # of a level, relative
FIRST_CHURN = -1  # the index of the noise that the initial state gets; that of a step has the step's


def karras_levels(num_steps: int) -> list[float]:
    """S_0 = 200 > ... > S_N = 0.01, evenly spaced in S^(1/7) (arXiv 2206.00364, eq. 5)."""
    high, low = HIGHEST_LEVEL ** (1 / RHO), LOWEST_LEVEL ** (1 / RHO)
    return [(high + i / num_steps * (low - high)) ** RHO for i in range(num_steps + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Churn:
    """Noise added before each step whose level lies between the bounds: the level rises by the share `relative`."""

    relative: float
    low: float = 0.0
    high: float = math.inf
    noise: float = 1.0  # factor of the noise's standard deviation

    @classmethod
    def of_run(cls, num_steps: int, *, s_churn: float, s_t_min: float, s_t_max: float, s_noise: float) -> Churn:
        """The churn of a rollout of N steps: relative rise min(s_churn / (N + 1), sqrt(1.2) - 1)."""
        return cls(relative=min(s_churn / (num_steps + 1), MAX_CHURN), low=s_t_min, high=s_t_max, noise=s_noise)

    def raised(self, level: float) -> float:
        return level * (1 + self.relative) if self.low < level < self.high else level

    def std(self, level: float) -> float:
        """Return the standard deviation of the noise that lifts a state from this level to the raised one."""
        return self.noise * math.sqrt(self.raised(level) ** 2 - level**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdmStep:
    """One step from the raised level S^ to the raised next one, with D = x0_hat at S^ and D' that of the step before:

    mu = keep*X^ + now*D + before*D'          next X^ = mu + std*z,  z ~ N(0, 1)
    """

    level: float  # S^
    keep: float
    now: float
    before: float = 0.0
    std: float  # 0: no churn follows, the step is no Gaussian draw

    @property
    def sigma(self) -> float:
        return self.level / (1 + self.level)

    @property
    def gain(self) -> float:
        """d(mu)/d(velocity) in units of std. Infinite where std is 0."""
        return -self.now * self.sigma / self.std if self.std > 0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EdmPlan:
    """Choices about a rollout, made before it starts."""

    steps: tuple[EdmStep, ...]
    start_level: float = HIGHEST_LEVEL
    start_std: float  # of the churn of the initial state
    last_level: float = LOWEST_LEVEL
    stored: tuple[int, ...] = ()  # the steps whose states are kept
    keep_means: ClassVar[bool] = False
    keep_states: ClassVar[bool] = True

    def trainable(self) -> list[int]:
        """The steps whose outcome is a Gaussian draw. Never the last one."""
        return [k for k, step in enumerate(self.steps) if step.std > 0]

    @torch.no_grad()
    def run(
        self, predict: Predict, noise: Tensor, seeds: Sequence[int], given: ConditionalFrames | None = None
    ) -> Trajectory:
        """See Plan.run; N + 1 predictions, the result is x0_hat at the last level. ValueError for noise of the wrong
        shape or dtype.

        The noise of step k is `step_noise` of each sample's seed (in [0, 2**63)). Given frames need no mention:
        whatever the state holds there, the denoiser sees the given latents, and its velocity's x0_hat is those.
        """
        require_latents(noise=noise)
        drawn = [k for k in (FIRST_CHURN, *range(len(self.steps))) if self._std(k) > 0]
        keys = {k: step_seeds(seeds, k).to(noise.device) for k in drawn}  # before the loop: copies may wait

        def churned(state: Tensor, k: int) -> Tensor:
            return state + self._std(k) * drawn_normal(keys[k], state) if k in keys else state

        state, clean_before = churned(self.start_level * noise, FIRST_CHURN), None
        states: dict[int, Tensor] = {}
        for k, step in enumerate(self.steps):
            latents, clean = x0_hat(predict, state, step.level)
            if k in self.stored:
                states[k] = latents
            state = step.keep * state + step.now * clean
            if step.before != 0:
                assert clean_before is not None
                state = state + step.before * clean_before
            state, clean_before = churned(state, k), clean
        return Trajectory(x0_hat(predict, state, self.last_level)[1], states=states)

    def _std(self, k: int) -> float:
        return self.start_std if k == FIRST_CHURN else self.steps[k].std


def x0_hat(predict: Predict, state: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The flow's latents of an EDM state, and the prediction of x0 there."""
    latents, sigma = state / (1 + level), level / (1 + level)
    return latents, latents - sigma * predict(latents, sigma)


def step_noise(seeds: Sequence[int], index: int, like: Tensor) -> Tensor:
    """The z of step `index` of a rollout: [B, ...] in the shape, dtype and device of `like`."""
    return drawn_normal(step_seeds(seeds, index).to(like.device), like)


def edm_plan(solver: str, num_steps: int, churn: Churn, *, stored: Sequence[int] = ()) -> EdmPlan:
    """The N steps of `edm_2ab` (two-step Adams-Bashforth in ln S, the multistep solver of RES) or `edm_euler`.

    Coefficients are float64 numbers of the host. ValueError for another solver, N < 1, or a churn so large that the
    level would not fall from one step to the next.
    """
    if solver not in SOLVERS or num_steps < 1:
        raise ValueError(f"no EDM solver {solver!r} of {num_steps} steps; there are {', '.join(SOLVERS)}, from 1 step")
    levels = karras_levels(num_steps)
    raised = [churn.raised(level) for level in levels[:-1]]
    if any(now <= after for now, after in itertools.pairwise(raised)):
        raise ValueError(f"{num_steps} steps with a churn of {churn.relative:.4f} do not fall: {raised}")
    steps = []
    for k, level in enumerate(raised):
        h = math.log(level / levels[k + 1])
        decayed = -math.expm1(-h)  # 1 - e^-h
        now = decayed
        if k > 0 and solver == "edm_2ab":
            now += h / math.log(raised[k - 1] / level) * (1 - decayed / h)
        # The noise of step k lifts S_{k+1}; the last level is where the result is read off, without noise.
        std = churn.std(levels[k + 1]) if k + 1 < num_steps else 0.0
        steps.append(EdmStep(level=level, keep=math.exp(-h), now=now, before=decayed - now, std=std))
    return EdmPlan(steps=tuple(steps), start_std=churn.std(levels[0]), stored=tuple(stored))
