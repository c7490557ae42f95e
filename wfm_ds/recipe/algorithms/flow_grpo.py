"""Settings of FlowGRPO and its variants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import RecipeSections, StreamSettings, count_of_fraction
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.recipe.sampling import DEFAULT_NOISE_LEVELS, SamplingRecipe


class FlowGrpoAlgorithm(StreamSettings):
    """Policy gradient on the denoising steps of stochastic rollouts: Flow-GRPO (arXiv 2505.05470). Keys of this section
    and of `sampling` select Flow-GRPO-Fast, MixGRPO, DanceGRPO, GRPO-Guard or Flow-DPPO."""

    name: Literal["flow_grpo"]
    """Selects this algorithm."""
    clip_ratio: PositiveFloat = 1e-4
    """PPO clip range: probability ratios are clipped to 1 - clip_ratio .. 1 + clip_ratio. Log-probabilities are means
    over elements. Published values of 1e-5 to 1e-3 are for latents of 65536 elements; smaller latents need larger
    values."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Ratios are clipped to at least 1 - clip_ratio_low. Unset: `clip_ratio`."""
    clip_ratio_high: PositiveFloat | None = None
    """Ratios are clipped to at most 1 + clip_ratio_high. Unset: `clip_ratio`."""
    trust_region: Literal["ratio", "divergence"] = "ratio"
    """Constraint that keeps the policy close to the old policy. `ratio`: clip the probability ratio. `divergence`:
    Flow-DPPO (arXiv 2606.11025), which drops denoising steps with a KL above `divergence` if their ratio has moved in
    the direction of the advantage."""
    divergence: PositiveFloat = 1e-5
    """With `trust_region: divergence`: maximum KL between the new and old policy at a denoising step, as a mean over
    elements. The published 1e-5 is for latents of 65536 elements; smaller latents need larger values."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the distance to the reference policy (see `kl_type`). 0: no reference forward pass."""
    kl_type: Literal["velocity", "gaussian", "flow_grpo"] = "gaussian"
    """Distance to the reference policy. `velocity`: mean squared velocity difference. `gaussian`: KL divergence of the
    denoising step, as a mean over elements. `flow_grpo`: this KL divergence times the length of the step in sigma, only
    with the solvers `flow_sde` and `dance`."""
    zero_std: Literal["keep", "drop"] = "drop"
    """Whether to train on groups in which all samples have the same reward and therefore the advantage 0. `drop`: do
    not train on these groups. `keep`: train on them with the loss of `kl_beta` only."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the noisy rollout steps that each sample is trained on, rounded down, but at least one. The steps are
    chosen at random for each sample. DanceGRPO: .6."""
    old_log_prob: Literal["auto", "rollout", "recompute"] = "auto"
    """Source of the old log-probabilities in the ratios. `rollout`: stored during the rollout. `recompute`: computed
    before the first update, with one additional forward pass for each trained step of the later updates. `auto`: in the
    first update, the current policy, because its weights are the same; in later updates, like `rollout`. If
    `rollout.max_staleness` is above 0, `auto` equals `recompute`, and both drop denoising steps that exceed
    `max_drift`."""
    max_drift: PositiveFloat = 10.0
    """With `rollout.max_staleness` above 0: drop denoising steps whose log-probabilities under the rollout policy and
    under the weights at the start of the RL step differ by more than max_drift * the clip range (with `trust_region:
    divergence`: whose KL exceeds max_drift * `divergence`)."""
    log_prob: Literal["published", "gaussian"] = "published"
    """With `sampling.solver: cps`: `published` omits the variance and the constant of the log-probability; `gaussian`
    is exact. Each needs its own value of `clip_ratio`."""
    reuse_guidance: bool = False
    """True: the first update runs only the conditional pass, and takes the predictions of the other guidance passes
    from the rollout, which has the same weights. If rollouts and training use batches of the same size, the results are
    the same. Each sample stores one more latent tensor per pass and stored step."""
    min_step_std: NonNegativeFloat = 0.05
    """Minimum noise std of trained steps; below it, rounding errors dominate the ratio, and the run stops. 0: no
    minimum."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): normalize the ratio to remove its negative bias and use one scale for all
    steps."""
    guard_reweight: bool = True
    """With `guard: true`: divide the loss of each step by the length of the step in sigma."""

    implementation = "wfm_ds.algorithms.flow_grpo:FlowGrpo"

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return count_of_fraction(sampling.num_noisy_steps, self.timestep_fraction)

    def list_policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"} if self.kl_beta > 0 else ())

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        return self.old_log_prob != "recompute" or (rollout.mode == "async" and rollout.max_staleness > 0)

    def check_recipe(self, recipe: RecipeSections) -> None:
        super().check_recipe(recipe)
        solver = recipe.sampling.solver
        if not recipe.sampling.is_stochastic:
            raise ValueError(
                f"algorithm {self.name} needs injected noise, but sampling.solver {solver} has none: set it to "
                f"{' or '.join(DEFAULT_NOISE_LEVELS)}"
            )
        if solver != "cps":
            self.require_defaults("log_prob", unless="sampling.solver: cps")
        rollout = recipe.rl.rollout
        if rollout.mode != "async" or rollout.max_staleness == 0 or self.old_log_prob == "rollout":
            self.require_defaults(
                "max_drift", unless="rollout.mode: async, max_staleness above 0 and old_log_prob: auto or recompute"
            )
        if self.reuse_guidance:
            self._check_reuse(recipe)
        if self.kl_beta > 0 and self.kl_type == "flow_grpo" and solver == "cps":
            raise ValueError("algorithm.kl_type: flow_grpo is not defined for sampling.solver cps: set it to gaussian")

    def _check_reuse(self, recipe: RecipeSections) -> None:
        sampling, rollout = recipe.sampling, recipe.rl.rollout
        if not sampling.uses_guidance():
            raise ValueError("algorithm.reuse_guidance needs sampling.guidance_scale above 1: remove one of the keys")
        obstacles = {
            "rollout.mode: async": rollout.mode == "async",
            "rollout.max_refills": rollout.max_refills > 0,
            "sampling.explore": sampling.explore is not None,
            "sampling.guidance.interval": sampling.guidance.interval != (0.0, 1.0),
            "sampling.guidance.skip_layers": bool(sampling.guidance.skip_layers),
            "sampling.guidance_scale_low: 1": sampling.guidance_scale_low == 1,
        }
        if used := [key for key, is_used in obstacles.items() if is_used]:
            raise ValueError(f"algorithm.reuse_guidance does not support {used[0]}: remove one of the keys")

    @model_validator(mode="after")
    def _check_unused_keys(self) -> FlowGrpoAlgorithm:
        if not self.guard:
            self.require_defaults("guard_reweight", unless="guard: true")
        if self.trust_region == "divergence":
            self.require_defaults("clip_ratio", "clip_ratio_low", "clip_ratio_high", unless="trust_region: ratio")
        else:
            self.require_defaults("divergence", unless="trust_region: divergence")
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            self.require_defaults("clip_ratio", unless="clip_ratio_low or clip_ratio_high unset")
        return self
