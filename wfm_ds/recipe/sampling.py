"""The recipe's `sampling` section, and its `window`: at which denoise steps of a rollout noise is injected, one class
for each kind."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.section import Section
from wfm_ds.recipe.stated import EVAL_STEPS, FPS, GUIDANCE_SCALE

# Which solvers inject noise, and how much unless `sampling.noise_level` says so.
NOISE_LEVELS = {"flow_sde": 0.7, "dance": 0.3, "cps": 0.8}
# Which ones sample in EDM coordinates, and the keys of their churn with the published values.
EDM_SOLVERS = ("edm_2ab", "edm_euler")
CHURN = {"s_churn": 1.0, "s_t_min": 0.0, "s_t_max": math.inf, "s_noise": 1.0}
Range = tuple[NonNegativeInt, NonNegativeInt]


class RandomWindow(Section):
    """Neighbouring steps, at a place drawn anew for each RL step (Flow-GRPO-Fast, MixGRPO)."""

    kind: Literal["random"]
    """Selects this kind."""
    size: PositiveInt
    """Steps with noise."""
    range: Range | None = None
    """The window lies within steps first .. last - 1 of [first, last]. Unset: the first half of the steps."""

    def bounds(self, num_steps: int) -> tuple[int, int]:
        return self.range or (0, num_steps // 2)

    def check(self, num_steps: int) -> None:
        _require_room(self.bounds(num_steps), self.size, num_steps)


class ProgressiveWindow(Section):
    """Neighbouring steps that move towards the clean end as training goes on, and begin again there (MixGRPO)."""

    kind: Literal["progressive"]
    """Selects this kind."""
    size: PositiveInt
    """Steps with noise."""
    stride: PositiveInt = 1
    """Denoise steps that the window moves by."""
    iters_per_position: PositiveInt = 25
    """RL steps between moves."""
    range: Range | None = None
    """The window lies within steps first .. last - 1 of [first, last]. Unset: all but the last step."""

    def bounds(self, num_steps: int) -> tuple[int, int]:
        return self.range or (0, num_steps - 1)

    def check(self, num_steps: int) -> None:
        _require_room(self.bounds(num_steps), self.size, num_steps)


class SubsetWindow(Section):
    """Some steps of a list, drawn anew for each RL step without replacement (Flow-Factory)."""

    kind: Literal["subset"]
    """Selects this kind."""
    size: PositiveInt
    """Steps with noise."""
    indices: list[NonNegativeInt] = Field(min_length=1)
    """The steps to draw from; 0 is the first, the last one is not allowed."""

    @model_validator(mode="after")
    def _distinct(self) -> SubsetWindow:
        if len(set(self.indices)) != len(self.indices) or self.size > len(self.indices):
            raise ValueError(f"size {self.size} needs at least as many different indices, got {self.indices}")
        return self

    def check(self, num_steps: int) -> None:
        if max(self.indices) > num_steps - 2:
            raise ValueError(
                f"sampling.window.indices may go to {num_steps - 2} when sampling.steps is {num_steps} (the last step "
                f"has no noise to train on), got {max(self.indices)}"
            )


Window = RandomWindow | ProgressiveWindow | SubsetWindow


def _require_room(bounds: tuple[int, int], size: int, num_steps: int) -> None:
    first, last = bounds
    if last > num_steps - 1 or last - first < size:
        raise ValueError(
            f"sampling.window has size {size} and the range [{first}, {last}] of {num_steps} steps: the range must "
            f"hold the window and end at {num_steps - 1} at most (the last step has no noise to train on)"
        )


class ExploreRecipe(Section):
    """Rollouts in two stages (Sol-RL, arXiv 2604.06916): many cheap candidates of each prompt are scored, and the best
    and the worst of them, rollout.group_size together, are trained on."""

    group_size: Annotated[int, Field(ge=2)]
    """Candidates per prompt, at least rollout.group_size. Of those with a reward the best half and the worst half of
    rollout.group_size are kept, ranked as algorithm.best_of_n ranks."""
    steps: Annotated[PositiveInt, Field(le=10_000)]
    """Denoising steps of a candidate, at most sampling.steps. With fewer steps than these a stochastic solver explores
    with `ode`: which sample is good depends on the initial noise, and the noise of a step belongs to that step."""
    regenerate: bool = True
    """Generate the samples that are kept again, from the same seeds in sampling.steps steps, and score them again: they
    are trained on with these rewards. False: train on the candidates themselves, which only algorithms can that need no
    more of a rollout than its clean latents."""


class SamplingRecipe(Section):
    """Sizes, and how images are denoised in rollouts and in validation."""

    height: PositiveInt
    """Pixels."""
    width: PositiveInt
    """Pixels."""
    num_frames: PositiveInt = 1
    """Frames of a video; 1 for images."""
    fps: PositiveFloat = FPS
    """Frames per second at which generated videos are written, shown, and given to the rewards. Cosmos3 is told it, and
    wants data.fps to be the same; other models do not see it."""
    steps: Annotated[PositiveInt, Field(le=10_000)] = 10
    """Denoising steps of a rollout."""
    grid: Literal["stock", "even"] = "stock"
    """Noise levels of a rollout's steps. `stock`: those of the pipeline's own scheduler; SD3's last one is .001 to
    .009, where next to nothing is left to denoise. `even`: q = 1, (N - 1)/N, .. 1/N for N steps, shifted as that
    scheduler shifts: next to its own grid for SANA and Wan, refused where it has no shift. Validation and exports
    keep the stock grid."""
    solver: Literal["ode", "dpm2", "flow_sde", "dance", "cps", "edm_2ab", "edm_euler"] = "ode"
    """Rollout solver: deterministic `ode` (Euler) or `dpm2` (second-order multistep); stochastic `flow_sde`
    (Flow-GRPO), `dance` (DanceGRPO) or `cps` (Flow-CPS); or, for ddrl, `edm_2ab` (two-step Adams-Bashforth) or
    `edm_euler`, which churn on a grid of their own. Validation has `eval_solver`."""
    noise_level: PositiveFloat | None = None
    """How much noise a stochastic solver injects. Unset: .7 for flow_sde, .3 for dance, .8 for cps (at most 1)."""
    window: Window | None = Field(default=None, discriminator="kind")
    """Denoise steps at which a stochastic solver injects noise; the others are `ode`. Unset: all but the last. An
    algorithm that needs log-probabilities trains on these steps."""
    explore: ExploreRecipe | None = None
    """Choose the samples of a group from many cheap candidates. Unset: every sample that is generated is trained on.
    For data.kind: prompts and colocated rollouts (docs/algorithms.md)."""
    same_noise: bool = False
    """The samples of a group start from the same noise; needs a stochastic solver."""
    s_churn: NonNegativeFloat | None = None
    """EDM solvers: noise added before each step raises its level by the share s_churn / (steps + 1), at most 9.5 %.
    Unset: 1."""
    s_t_min: NonNegativeFloat | None = None
    """EDM solvers: noise is added at levels above this one only; levels go from 200 to 0.01. Unset: 0."""
    s_t_max: PositiveFloat | None = None
    """EDM solvers: noise is added at levels below this one only. Unset: no bound."""
    s_noise: PositiveFloat | None = None
    """EDM solvers: factor of the added noise's standard deviation. Unset: 1."""
    eval_steps: Annotated[PositiveInt, Field(le=10_000)] = EVAL_STEPS
    """Denoising steps in validation and samples."""
    eval_solver: Literal["ode", "dpm2"] | None = None
    """Solver of validation and samples: `ode` (Euler) or `dpm2` (second-order multistep). Unset: dpm2 where the
    pipeline's own scheduler is a multistep one (SANA, Wan, Cosmos), else ode."""
    guidance_scale: Annotated[float, Field(ge=1)] = GUIDANCE_SCALE
    """w in v_uncond + w * (v_cond - v_uncond), in rollouts, validation and samples; 1 runs no unconditional pass."""
    guidance_scale_low: Annotated[float, Field(ge=1)] | None = None
    """Models with two experts (Wan 2.2 A14B): w of the one for less noise; 1 runs no unconditional pass there. Unset:
    guidance_scale."""
    guidance_batch: Literal["separate", "joint"] = "separate"
    """The two passes of a guided prediction: one forward each, or `joint`: one forward of both where twice the samples
    fit into engine.max_forward_batch, in validation, and in the rollouts of algorithms that compare no
    log-probabilities. Equal but for rounding."""
    negative_prompt: str | None = None
    """Text of the unconditional pass when guidance_scale > 1. Unset: the family's stock negative prompt."""

    @model_validator(mode="after")
    def _guided_to_share(self) -> SamplingRecipe:
        if self.guidance_batch == "joint" and self.guidance_scale == 1:
            raise ValueError("guidance_batch: joint needs a guidance_scale above 1: there is only one pass to run")
        return self

    @model_validator(mode="after")
    def _guided_everywhere(self) -> SamplingRecipe:
        if self.guidance_scale_low is not None and self.guidance_scale == 1:
            raise ValueError(
                "guidance_scale_low needs a guidance_scale above 1: else no unconditional pass is run at all"
            )
        return self

    def guidance_of(self, expert: int) -> float:
        """The guidance scale of an expert."""
        return self.guidance_scale if expert == 0 or self.guidance_scale_low is None else self.guidance_scale_low

    def is_guided(self, expert: int = 0) -> bool:
        """Tell if predictions of this expert take an unconditional pass: no other's do where the first one's do not."""
        return self.guidance_of(expert) != 1

    @property
    def of_candidates(self) -> SamplingRecipe | None:
        """This section with the steps of a candidate; None without candidates."""
        return None if self.explore is None else self.model_copy(update={"steps": self.explore.steps})

    @property
    def is_stochastic(self) -> bool:
        return self.solver in NOISE_LEVELS

    @model_validator(mode="after")
    def _candidates_are_cheap(self) -> SamplingRecipe:
        if self.explore is None:
            return self
        if self.explore.steps > self.steps:
            raise ValueError(
                f"explore.steps {self.explore.steps} is more than steps {self.steps}: candidates are to be cheaper"
            )
        if self.same_noise:
            raise ValueError("explore tells candidates apart by their initial noise: remove same_noise or explore")
        return self

    @property
    def num_noisy_steps(self) -> int:
        """Denoise steps of a rollout whose outcome is a Gaussian draw that can be trained on."""
        if not self.is_stochastic:
            return 0
        return self.steps - 1 if self.window is None else self.window.size

    @property
    def churn(self) -> dict[str, float]:
        """The keys of the EDM solvers' churn, with their defaults."""
        return {key: default if getattr(self, key) is None else getattr(self, key) for key, default in CHURN.items()}

    @model_validator(mode="after")
    def _churn_fits(self) -> SamplingRecipe:
        if self.solver not in EDM_SOLVERS:
            unread = [key for key in CHURN if getattr(self, key) is not None]
            if unread:
                raise ValueError(
                    f"the solver {self.solver} does not read {' and '.join(unread)}: choose "
                    f"{' or '.join(EDM_SOLVERS)}, or remove them"
                )
        elif self.churn["s_t_min"] >= self.churn["s_t_max"]:
            raise ValueError(f"s_t_min {self.s_t_min} must be below s_t_max {self.s_t_max}")
        return self

    @model_validator(mode="after")
    def _noise_fits(self) -> SamplingRecipe:
        if self.solver in EDM_SOLVERS:
            unread = [key for key in ("noise_level", "window") if getattr(self, key) is not None]
            unread += self.changed("grid")
            if unread:
                raise ValueError(
                    f"the solver {self.solver} does not read {' and '.join(unread)}: set s_churn, or remove them"
                )
            return self
        if not self.is_stochastic:
            unread = [k for k in ("noise_level", "window") if getattr(self, k) is not None]
            unread += ["same_noise"] if self.same_noise else []
            if unread:
                raise ValueError(
                    f"the solver {self.solver} injects no noise, so {' and '.join(unread)} cannot be set: choose "
                    f"{', '.join(NOISE_LEVELS)}, or remove them"
                )
            return self
        if self.steps < 2:
            raise ValueError(f"the solver {self.solver} needs at least 2 steps: the last one is never a Gaussian draw")
        if self.solver == "cps" and self.noise_level is not None and self.noise_level > 1:
            raise ValueError(f"the noise_level of cps is at most 1, got {self.noise_level}")
        if self.window is not None:
            self.window.check(self.steps)
        return self
