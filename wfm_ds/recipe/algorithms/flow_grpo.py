"""The settings of FlowGRPO and its variants; its mathematics: algorithms/flow_grpo.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from wfm_ds.recipe.algorithms.base import GivenFramesSettings, OtherSections, num_of_share
from wfm_ds.recipe.sampling import NOISE_LEVELS, SamplingRecipe
from wfm_ds.recipe.sections import RolloutRecipe


class FlowGrpoAlgorithm(GivenFramesSettings):
    """Policy gradient on the denoise steps of stochastic rollouts: Flow-GRPO (arXiv 2505.05470) and its variants
    Flow-GRPO-Fast, MixGRPO, DanceGRPO, GRPO-Guard and Flow-DPPO, which are settings of it and of `sampling`."""

    name: Literal["flow_grpo"]
    """Selects this algorithm."""
    clip_ratio: PositiveFloat = 1e-4
    """The ratio of new to old probability counts within 1 -+ clip_ratio. Log-probabilities are means over elements, so
    the published 1e-5 to 1e-3 are for latents of 65536 elements; small latents need larger ones."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The lower bound is 1 - clip_ratio_low. Unset: clip_ratio."""
    clip_ratio_high: PositiveFloat | None = None
    """The upper bound is 1 + clip_ratio_high. Unset: clip_ratio."""
    trust_region: Literal["ratio", "divergence"] = "ratio"
    """What holds a policy near the old one. `ratio`: the clip range of the ratio; `divergence`: Flow-DPPO (arXiv
    2606.11025), which leaves out a step whose distribution is away from the old one by `divergence` and whose ratio has
    moved on with its advantage."""
    divergence: PositiveFloat = 1e-5
    """The bound of trust_region: divergence, on the KL of a denoise step under the new and the old weights, a mean over
    elements. The published 1e-5 is for latents of 65536 elements; small latents need a larger one."""
    kl_beta: NonNegativeFloat = 0.0
    """Weight of the distance to the reference. 0 runs no reference forward."""
    kl_type: Literal["velocity", "gaussian", "flow_grpo"] = "gaussian"
    """The distance: mean squared velocity difference; KL of the two steps, a mean over elements; or Flow-GRPO's, which
    is that KL times the length of the step (for flow_sde and dance)."""
    zero_std: Literal["keep", "drop"] = "drop"
    """A group whose rewards are all equal has the advantage 0: `drop` does not train it, `keep` does, for the sake of
    kl_beta."""
    timestep_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the rollout's noisy steps that each sample is trained on (at least one), drawn for each sample
    (DanceGRPO: .6)."""
    old_log_prob: Literal["auto", "rollout", "recompute"] = "auto"
    """Log-probabilities that ratios compare with. `rollout`: those of the rollout; `recompute`: one forward per trained
    step before the first update; `auto`: in the first update the new ones themselves, whose weights are the same, then
    the rollout's. With rollout.max_staleness above 0 the weights are not the same: `auto` is `recompute`, and both
    drop what these weights have moved away from (max_drift)."""
    max_drift: PositiveFloat = 10.0
    """With rollout.max_staleness above 0: a denoise step whose log-probability under the weights at the start of the RL
    step differs from that of the rollout by more than this many clip ranges does not train the policy; with
    trust_region: divergence, one whose distribution differs by more than this many times `divergence`. How many are
    dropped is policy/dropped_fraction."""
    log_prob: Literal["published", "gaussian"] = "published"
    """`published` leaves variance and constant out for the solver cps; its clip_ratio is another one
    than that of `gaussian`."""
    min_step_std: NonNegativeFloat = 0.05
    """Steps whose noise is smaller are refused: rounding errors of the velocity dominate their ratio. 0 allows all."""
    guard: bool = False
    """GRPO-Guard (arXiv 2510.22319): a ratio without negative bias, on one scale for all steps."""
    guard_reweight: bool = True
    """GRPO-Guard: divide each step's loss by its length in sigma."""

    implementation = "wfm_ds.algorithms.flow_grpo:FlowGrpo"

    def terms_per_sample(self, sampling: SamplingRecipe) -> int:
        return num_of_share(sampling.num_noisy_steps, self.timestep_fraction)

    def policies(self, rollout: RolloutRecipe) -> frozenset[str]:
        return frozenset({"ref"} if self.kl_beta > 0 else ())

    def reads_rollout_log_probs(self, rollout: RolloutRecipe) -> bool:
        return self.old_log_prob != "recompute" or (rollout.mode == "async" and rollout.max_staleness > 0)

    def check(self, recipe: OtherSections) -> None:
        super().check(recipe)
        solver = recipe.sampling.solver
        if not recipe.sampling.is_stochastic:
            raise ValueError(
                f"algorithm {self.name} trains on noisy denoise steps, and sampling.solver {solver} has none: "
                f"choose {', '.join(NOISE_LEVELS)}"
            )
        if solver != "cps":
            self.require_default("log_prob", unless="sampling.solver: cps")
        rollout = recipe.rl.rollout
        if rollout.mode != "async" or rollout.max_staleness == 0 or self.old_log_prob == "rollout":
            self.require_default(
                "max_drift", unless="rollout.mode: async, max_staleness above 0 and old_log_prob: auto or recompute"
            )
        if self.kl_beta > 0 and self.kl_type == "flow_grpo" and solver == "cps":
            raise ValueError("algorithm.kl_type flow_grpo is not defined for sampling.solver cps: choose gaussian")

    @model_validator(mode="after")
    def _all_read(self) -> FlowGrpoAlgorithm:
        if not self.guard:
            self.require_default("guard_reweight", unless="guard: true")
        if self.trust_region == "divergence":
            self.require_default("clip_ratio", "clip_ratio_low", "clip_ratio_high", unless="trust_region: ratio")
        else:
            self.require_default("divergence", unless="trust_region: divergence")
        if self.clip_ratio_low is not None and self.clip_ratio_high is not None:
            self.require_default("clip_ratio", unless="clip_ratio_low or clip_ratio_high unset")
        return self
