"""The recipe's `sampling` section, and the kinds of `sampling.window` (denoising steps with injected noise)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from wfm_ds.recipe.section import Fraction, Section
from wfm_ds.recipe.shared_defaults import DEFAULT_EVAL_STEPS, DEFAULT_FPS, DEFAULT_GUIDANCE_SCALE

# {stochastic solver: default of sampling.noise_level}
DEFAULT_NOISE_LEVELS = {"flow_sde": 0.7, "dance": 0.3, "cps": 0.8}
CPS_EVAL_NOISE = 1.0  # noise level of `eval_solver: cps`, that of diffusers' stochastic_sampling
# Solvers in EDM coordinates, and their churn keys with the published values.
EDM_SOLVERS = ("edm_2ab", "edm_euler")
CHURN_DEFAULTS = {"s_churn": 1.0, "s_t_min": 0.0, "s_t_max": math.inf, "s_noise": 1.0}
StepRange = tuple[NonNegativeInt, NonNegativeInt]


class RandomWindow(Section):
    """Window of consecutive noisy steps. Each RL step draws a new random position (Flow-GRPO-Fast, MixGRPO)."""

    kind: Literal["random"]
    """Selects this kind."""
    size: PositiveInt
    """Number of steps with noise."""
    range: StepRange | None = None
    """[start, stop]: the window lies within the denoising steps start to stop - 1, counted from 0. Unset: the first
    half of the steps."""

    def step_bounds(self, num_steps: int) -> tuple[int, int]:
        return self.range or (0, num_steps // 2)

    def check_steps(self, num_steps: int) -> None:
        _require_window_fits(self.step_bounds(num_steps), self.size, num_steps)


class ProgressiveWindow(Section):
    """Window of consecutive noisy steps that moves towards the last denoising steps during training, and then starts
    again at the first steps (MixGRPO)."""

    kind: Literal["progressive"]
    """Selects this kind."""
    size: PositiveInt
    """Number of steps with noise."""
    stride: PositiveInt = 1
    """Number of denoising steps by which the window moves."""
    iters_per_position: PositiveInt = 25
    """RL steps between two moves of the window."""
    range: StepRange | None = None
    """[start, stop]: the window lies within the denoising steps start to stop - 1, counted from 0. Unset: all steps
    except the last."""

    def step_bounds(self, num_steps: int) -> tuple[int, int]:
        return self.range or (0, num_steps - 1)

    def check_steps(self, num_steps: int) -> None:
        _require_window_fits(self.step_bounds(num_steps), self.size, num_steps)


class SubsetWindow(Section):
    """Noisy steps that each RL step draws at random from a list, without replacement (Flow-Factory)."""

    kind: Literal["subset"]
    """Selects this kind."""
    size: PositiveInt
    """Number of steps with noise."""
    indices: list[NonNegativeInt] = Field(min_length=1)
    """Denoising steps to draw from. 0 is the first step. The last step is not allowed."""

    @model_validator(mode="after")
    def _check_indices(self) -> SubsetWindow:
        if len(set(self.indices)) != len(self.indices) or self.size > len(self.indices):
            raise ValueError(f"size {self.size} needs at least {self.size} different indices, got {self.indices}")
        return self

    def check_steps(self, num_steps: int) -> None:
        if max(self.indices) > num_steps - 2:
            raise ValueError(
                f"sampling.window.indices must be at most {num_steps - 2} with sampling.steps {num_steps} (the last "
                f"step is never trained), got {max(self.indices)}"
            )


Window = RandomWindow | ProgressiveWindow | SubsetWindow


def _require_window_fits(bounds: tuple[int, int], size: int, num_steps: int) -> None:
    first, last = bounds
    if last > num_steps - 1 or last - first < size:
        raise ValueError(
            f"sampling.window has size {size} and range [{first}, {last}] with {num_steps} steps: the range must "
            f"contain the window and end at {num_steps - 1} or earlier (the last step is never trained)"
        )


class ExploreRecipe(Section):
    """Two-stage rollouts (Sol-RL, arXiv 2604.06916): score many cheap candidates per prompt and train on
    `rollout.group_size` of them, the best and the worst."""

    group_size: Annotated[int, Field(ge=2)]
    """Candidates per prompt, at least `rollout.group_size`. Half of the selected samples are the best candidates, half
    the worst, ranked as in `algorithm.best_of_n`. Candidates without a reward are selected only if too few candidates
    have one."""
    steps: Annotated[PositiveInt, Field(le=10_000)]
    """Denoising steps per candidate, at most `sampling.steps`. With fewer steps and a stochastic solver, candidates are
    generated with `ode`, so that they depend only on their initial noise."""
    regenerate: bool = True
    """True: generate the selected samples again from their seeds with `sampling.steps` steps, then score and train on
    the new samples. False: train on the candidates themselves. This works only with algorithms that need only the clean
    latents of a rollout."""


def is_inside(sigma: float, low: float, high: float) -> bool:
    """Return whether low <= sigma <= high in float32, the dtype of noise levels in training."""
    return bool(np.float32(low) <= np.float32(sigma) <= np.float32(high))


class GuidanceRecipe(Section):
    """Further settings of classifier-free guidance. Except for `interval`, only some model families support them."""

    interval: tuple[Fraction, Fraction] = (0.0, 1.0)
    """[low, high]: noise levels with guidance. At other levels, there is only the conditional pass in rollouts and
    evaluations (arXiv 2404.07724). [0, 1]: guidance at all levels."""
    skip_layers: list[NonNegativeInt] = Field(default_factory=list)
    """SD3: transformer blocks that a third pass skips (skip-layer guidance). `skip_scale` * (v_cond -
    v_skip) is added to the guided prediction. Stability AI recommends [7, 8, 9] for SD3.5 medium."""
    skip_scale: PositiveFloat = 2.8
    """SD3: scale of skip-layer guidance."""
    skip_interval: tuple[Fraction, Fraction] | None = None
    """SD3: noise levels with skip-layer guidance. Unset: the levels from 1 % to 20 % of the denoising steps, as in
    diffusers."""
    audio_scale: Annotated[float, Field(ge=1)] | None = None
    """LTX-2: guidance scale of the sound. `guidance_scale` is then that of the video only. Unset: `guidance_scale`. The
    defaults of diffusers are 7 for the sound and 3 for the video."""
    stg_blocks: list[NonNegativeInt] = Field(default_factory=list)
    """LTX-2: transformer blocks without self-attention in a further pass (spatio-temporal guidance). `stg_scale` *
    (v_cond - v_stg) is added to the guided prediction. diffusers' default is [28]."""
    stg_scale: PositiveFloat = 1.0
    """LTX-2: scale of spatio-temporal guidance."""
    modality_scale: Annotated[float, Field(ge=1)] = 1.0
    """LTX-2: scale of modality guidance. Above 1, there is a further pass without attention between sound and video,
    and (`modality_scale` - 1) * (v_cond - v_isolated) is added to the guided prediction. diffusers' default is 3."""
    rescale: Fraction = 0.0
    """LTX-2: how far the standard deviation of the guided clean prediction is rescaled to that of the conditional one,
    for video and sound separately. 0: not at all. diffusers' default is .7."""

    @model_validator(mode="after")
    def _check_intervals(self) -> GuidanceRecipe:
        for key in ("interval", "skip_interval"):
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{key} must be [low, high] with low < high, got {list(bounds)}")
        if not self.skip_layers:
            self.require_defaults("skip_scale", "skip_interval", unless="skip_layers is set")
        if not self.stg_blocks:
            self.require_defaults("stg_scale", unless="stg_blocks is set")
        return self


class SamplingRecipe(Section):
    """Sample size, solvers and guidance for rollouts, validation and logged samples."""

    height: PositiveInt
    """Height in pixels."""
    width: PositiveInt
    """Width in pixels."""
    num_frames: PositiveInt = 1
    """Number of video frames. 1: images."""
    fps: PositiveFloat = DEFAULT_FPS
    """Frame rate of generated videos, for files and rewards. Cosmos3 is also conditioned on it and needs the same
    `data.fps`."""
    steps: Annotated[PositiveInt, Field(le=10_000)] = 10
    """Denoising steps in rollouts."""
    grid: Literal["stock", "even"] = "stock"
    """Noise levels of the rollout steps. `stock`: the levels of the pipeline's scheduler; for SD3 the last one is only
    .001 to .009. `even`: q = 1, (N - 1)/N, .. 1/N for N steps, shifted by `grid_shift`; close to `stock` for SANA and
    Wan. For validation see `eval_grid`."""
    grid_shift: PositiveFloat | None = None
    """Timestep shift s of `even` levels in `grid` and `eval_grid`: sigma = s * q / (1 + (s - 1) * q). Unset: the shift
    of the pipeline's scheduler. Required for schedulers without a shift, such as that of Cosmos-Predict2.5."""
    solver: Literal["ode", "dpm2", "flow_sde", "dance", "cps", "edm_2ab", "edm_euler"] = "ode"
    """Rollout solver. Deterministic: `ode` (Euler), `dpm2` (second-order multistep). Stochastic: `flow_sde`
    (Flow-GRPO), `dance` (DanceGRPO), `cps` (Flow-CPS). For ddrl, with churn and their own noise levels: `edm_2ab`
    (two-step Adams-Bashforth), `edm_euler`. For validation see `eval_solver`."""
    noise_level: PositiveFloat | None = None
    """Noise scale of a stochastic solver. Unset: .7 for `flow_sde`, .3 for `dance`, .8 for `cps` (at most 1)."""
    window: Window | None = Field(default=None, discriminator="kind")
    """Denoising steps with injected noise, for stochastic solvers; the other steps use `ode`. Algorithms based on
    log-probabilities train on these steps. Unset: all steps add noise (`flow_sde`), or all except the last (`dance`,
    `cps`); all except the last are trained."""
    explore: ExploreRecipe | None = None
    """Select the samples of a group from many cheap candidates. Needs `data.kind: prompts` and colocated rollouts
    (docs/rl_training.md). Unset: train on every generated sample."""
    same_noise: bool = False
    """Start all samples of a group from the same noise. Needs a stochastic solver."""
    s_churn: NonNegativeFloat | None = None
    """EDM solvers: noise added before each step multiplies the noise level by 1 + s_churn / (steps + 1), but at most by
    1.095. Unset: 1."""
    s_t_min: NonNegativeFloat | None = None
    """EDM solvers: add noise only above this noise level. Levels range from 200 to 0.01. Unset: 0."""
    s_t_max: PositiveFloat | None = None
    """EDM solvers: add noise only below this noise level. Unset: no bound."""
    s_noise: PositiveFloat | None = None
    """EDM solvers: factor on the standard deviation of the added noise. Unset: 1."""
    eval_steps: Annotated[PositiveInt, Field(le=10_000)] = DEFAULT_EVAL_STEPS
    """Denoising steps in validation and logged samples."""
    eval_grid: Literal["stock", "even"] = "stock"
    """Noise levels in validation and logged samples, with the values of `grid`. `even` is for models that generate in
    few steps. With `even`, `eval_solver` is `ode` or `cps`, and exports contain the noise levels or the scheduler with
    which plain diffusers generates such samples (docs/exports.md)."""
    eval_solver: Literal["ode", "dpm2", "cps"] | None = None
    """Solver in validation and logged samples: `ode` (Euler), `dpm2` (second-order multistep) or `cps`, which adds
    noise as in rollouts with `solver: cps` and `noise_level: 1`. `cps` needs these two values and `eval_grid: even`.
    Unset: `dpm2` if the pipeline's scheduler is a multistep one (SANA, Wan, Cosmos) and `eval_grid` is `stock`, else
    `ode`."""
    guidance_scale: Annotated[float, Field(ge=1)] = DEFAULT_GUIDANCE_SCALE
    """Classifier-free guidance scale w in rollouts, validation and logged samples: the prediction is v_uncond + w *
    (v_cond - v_uncond), from an unconditional and a conditional prediction. 1: no guidance and no unconditional
    pass."""
    guidance_scale_low: Annotated[float, Field(ge=1)] | None = None
    """Models with two experts (Wan 2.2 A14B): guidance scale of the low-noise expert. 1: no guidance for this expert.
    Unset: `guidance_scale`."""
    guidance: GuidanceRecipe = GuidanceRecipe()
    """Further settings of guidance. They need a `guidance_scale` above 1."""
    guidance_batch: Literal["separate", "joint"] = "separate"
    """How guided predictions are computed. `separate`: with one forward pass for the conditional and one for the
    unconditional prediction. `joint`: with a single forward pass, if twice the number of samples fits into
    `engine.max_forward_batch`. In rollouts, `joint` applies only to algorithms that do not compare log-probabilities.
    The results differ only in rounding."""
    negative_prompt: str | None = None
    """Text of the unconditional pass if `guidance_scale` is above 1. Unset: the model family's default."""

    @model_validator(mode="after")
    def _check_guidance(self) -> SamplingRecipe:
        if self.guidance_batch == "joint" and self.guidance_scale == 1:
            raise ValueError("guidance_batch: joint needs a guidance_scale above 1: there is only one pass otherwise")
        if self.guidance_scale == 1 and self.guidance != GuidanceRecipe():
            raise ValueError("guidance needs a guidance_scale above 1: raise it, or remove guidance")
        if self.guidance_scale_low is not None and self.guidance_scale == 1:
            raise ValueError("guidance_scale_low needs a guidance_scale above 1: else there is no unconditional pass")
        return self

    @model_validator(mode="after")
    def _check_grids(self) -> SamplingRecipe:
        if self.eval_grid == "even" and self.eval_solver == "dpm2":
            raise ValueError("eval_grid: even does not work with eval_solver: dpm2: set eval_solver to ode")
        if self.grid_shift is not None and self.grid == self.eval_grid == "stock":
            raise ValueError("grid_shift has no effect on stock levels: set grid or eval_grid to even, or remove it")
        if self.eval_solver != "cps":
            return self
        if self.eval_grid != "even":
            raise ValueError("eval_solver: cps needs eval_grid: even, because exports contain a scheduler for it")
        if self.solver != "cps" or self.noise_level != CPS_EVAL_NOISE:
            raise ValueError(
                f"eval_solver: cps needs solver: cps and noise_level: {CPS_EVAL_NOISE:g}, the only noise level of "
                f"diffusers, got {self.solver} and {self.noise_level}: set them, or set eval_solver: ode"
            )
        if self.eval_steps < 2:
            raise ValueError("eval_solver: cps needs at least 2 eval_steps, because the last one adds no noise")
        return self

    def expert_guidance_scale(self, expert: int) -> float:
        """Return the guidance scale of an expert. 1 is the low-noise expert of a model with two experts."""
        return self.guidance_scale if expert == 0 or self.guidance_scale_low is None else self.guidance_scale_low

    def uses_guidance(self, expert: int = 0) -> bool:
        """Return whether this expert runs an unconditional pass. No expert does if expert 0 does not."""
        return self.expert_guidance_scale(expert) != 1

    def guides(self, expert: int, sigma: float | None) -> bool:
        """Return whether guidance is used at this noise level. None: whether it is used at any noise level."""
        return self.uses_guidance(expert) and (sigma is None or is_inside(sigma, *self.guidance.interval))

    @property
    def candidate_sampling(self) -> SamplingRecipe | None:
        """Sampling settings of candidate samples, which use a different number of steps. None if `explore` is unset."""
        return None if self.explore is None else self.model_copy(update={"steps": self.explore.steps})

    @property
    def is_stochastic(self) -> bool:
        return self.solver in DEFAULT_NOISE_LEVELS

    @model_validator(mode="after")
    def _check_candidates(self) -> SamplingRecipe:
        if self.explore is None:
            return self
        if self.explore.steps > self.steps:
            raise ValueError(f"explore.steps {self.explore.steps} is more than steps {self.steps}: lower it")
        if self.same_noise:
            raise ValueError("explore needs different initial noise per candidate: remove same_noise or explore")
        return self

    @property
    def num_noisy_steps(self) -> int:
        """Number of rollout steps with injected noise, on which log-probability losses can train."""
        if not self.is_stochastic:
            return 0
        return self.steps - 1 if self.window is None else self.window.size

    @property
    def churn_settings(self) -> dict[str, float]:
        """Churn settings {key: value} of the EDM solvers, with defaults for unset keys."""
        own = {key: getattr(self, key) for key in CHURN_DEFAULTS}
        return CHURN_DEFAULTS | {key: value for key, value in own.items() if value is not None}

    @model_validator(mode="after")
    def _check_noise(self) -> SamplingRecipe:
        if self.solver in EDM_SOLVERS:
            if unread := self.non_default_keys("noise_level", "window", "grid"):
                raise ValueError(
                    f"solver {self.solver} does not read {' and '.join(unread)}: set s_churn, or remove them"
                )
            if self.churn_settings["s_t_min"] >= self.churn_settings["s_t_max"]:
                raise ValueError(f"s_t_min {self.s_t_min} must be below s_t_max {self.s_t_max}")
            return self
        if unread := self.non_default_keys(*CHURN_DEFAULTS):
            raise ValueError(
                f"solver {self.solver} does not read {' and '.join(unread)}: set solver to "
                f"{' or '.join(EDM_SOLVERS)}, or remove them"
            )
        if not self.is_stochastic:
            if unread := self.non_default_keys("noise_level", "window", "same_noise"):
                raise ValueError(
                    f"solver {self.solver} injects no noise and does not read {' and '.join(unread)}: set solver to "
                    f"{' or '.join(DEFAULT_NOISE_LEVELS)}, or remove them"
                )
            return self
        if self.steps < 2:
            raise ValueError(f"solver {self.solver} needs at least 2 steps: the last one has no noise")
        if self.solver == "cps" and self.noise_level is not None and self.noise_level > 1:
            raise ValueError(f"noise_level must be at most 1 for cps, got {self.noise_level}")
        if self.window is not None:
            self.window.check_steps(self.steps)
        return self
