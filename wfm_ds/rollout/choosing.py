"""Colocated rollouts that generate more samples than the step trains on and select among them by reward.

`sampling.explore` selects within groups: the best and the worst of many cheap candidates. `rollout.max_refills`
selects groups: groups with equal rewards are replaced by groups of other prompts. With both, the rewards of the
candidates decide whether a group is replaced.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Rewards, best_and_worst, step_rewards
from wfm_ds.algorithms.plans import exploring_plan
from wfm_ds.algorithms.terms import keyed_permutation
from wfm_ds.chunks import even_shares
from wfm_ds.distributed.world import World
from wfm_ds.rollout.choice import Choice, correlation_in_groups
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_ds.rollout.groups import RefillableGroups, RewardedGroup
from wfm_ds.rollout.members import RolloutSample, StepRollouts, rewarded_groups
from wfm_ds.rollout.placing import placed
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import failure_reasons
from wfm_ds.run.job import Job
from wfm_ds.sampling.denoise import FlowPlan
from wfm_ds.types import Rollout, Score

log = logging.getLogger(__name__)


class ChoosingSource(ColocatedSource):
    """Generates and scores candidates round by round until the step has enough informative groups."""

    def __init__(self, job: Job, groups: RefillableGroups, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        super().__init__(job, groups, rewards, algorithm)
        self.refillable = groups
        recipe = job.recipe
        self.explore, self.max_refills = recipe.sampling.explore, recipe.rl.rollout.max_refills
        self.num_candidates = self.explore.group_size if self.explore else self.group_size  # per group
        self.regenerates = self.explore is not None and self.explore.regenerate
        self._cheap: FlowPlan | None = None  # None: candidates use the plan of the rollouts
        settings = recipe.sampling.of_candidates
        if settings is not None and settings.steps < recipe.sampling.steps:
            self._cheap = exploring_plan(settings, job.model.rollout_sigmas(settings))
        self._candidates: dict[str, Candidate] = {}  # of the current step, by sample id
        self._stats: dict[str, float] = {}

    def next(self, step: int) -> StepRollouts:
        """Generate candidates, select samples, and regenerate them with `sampling.explore.regenerate`. Collective."""
        selection, candidate_groups = Choice(self.job.recipe.rl.rollout.prompts_per_step), list[RewardedGroup]()
        selected = Hold(self.job.world)
        self._candidates = {}
        attempt = 0
        while True:
            generated, rewards = self._round(step, attempt, selection)
            candidate_groups += rewarded_groups(generated.members, rewards.totals)
            if not self.regenerates:
                selected.take(generated, selection.members)
            if not selection.num_missing or attempt == self.max_refills:  # same on all ranks: depends on scores only
                break
            attempt += 1
        self._stats = measured(selection, candidate_groups, attempt)
        if self.regenerates:
            rollouts = self.generate(selection.members, self.algorithm.plan(step))
        else:
            rollouts = selected.shared_out(selection.members)
        return dataclasses.replace(rollouts, rewarded=candidate_groups)

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        if not self.regenerates:
            return [self._candidates[m.sample_id].scores for m in rollouts.members]
        scores = super().scores(rollouts)
        candidate_totals = [self._candidates[m.sample_id].total for m in rollouts.members]
        totals = step_rewards(scores, self.job.recipe.rl.reward).totals
        correlation = correlation_in_groups(candidate_totals, totals, [m.group_id for m in rollouts.members])
        if correlation is not None:
            self._stats["rollout/regenerated_correlation"] = correlation
        return scores

    def stats(self) -> dict[str, float]:
        return super().stats() | self._stats

    def _round(self, step: int, attempt: int, choice: Choice) -> tuple[StepRollouts, Rewards]:
        """Generate and score the missing groups and add them to the selection.

        Returns the generated samples and the rewards used for the selection.
        """
        recipe = self.job.recipe
        groups = self.refillable.refill(step, attempt) if attempt else self.groups.groups(step)
        samples = self.members(
            groups[: choice.num_missing], self.num_candidates, step, first_group=attempt * choice.num_groups
        )
        generated = self.generate(samples, self._cheap or self.algorithm.plan(step))
        with self.job.timer("reward_wait"):
            scores = super().scores(generated)
        rewards = step_rewards(scores, recipe.rl.reward)
        if reasons := failure_reasons(scores):
            count = sum(total is None for total in rewards.totals)
            log.warning("step %d: %d of %d candidates have no reward: %s", step, count, len(scores), reasons)
        self._candidates |= {
            m.sample_id: Candidate(scores[i], rewards.totals[i]) for i, m in enumerate(generated.members)
        }
        if recipe.rl.reward.shuffle:  # selecting by the true rewards would leak them into the control run
            rewards = rewards.reordered(
                keyed_permutation(len(scores), recipe.run.seed, "candidate_shuffle", step, attempt)
            )
        group_ids = [m.group_id for m in samples]
        indices, informative = best_and_worst(rewards, group_ids, recipe.rl.algorithm, self.group_size)
        choice.add([samples[i] for i in indices], informative)
        return generated, rewards


@dataclass(frozen=True, slots=True)
class Candidate:
    """The scores and the total reward of one candidate."""

    scores: dict[str, Score]
    total: float | None


class Hold:
    """The samples selected so far. Each stays on the replica that generated it until `distribute_evenly`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._mine: dict[str, Rollout] = {}
        self._owners: dict[str, int] = {}
        self._like: Rollout | None = None  # any sample: all rounds have the same plan and shape

    def take(self, generated: StepRollouts, chosen: Sequence[RolloutSample]) -> None:
        """Add the selected samples of a round and drop samples that are no longer selected.

        Every replica generates at least one sample in the first round.
        """
        for replica, shard in enumerate(even_shares(len(generated.members), self.world.dp_size)):
            self._owners |= {generated.members[i].sample_id: replica for i in shard}
        available = self._mine | {rollout.sample_id: rollout for rollout in generated.mine}
        self._mine = {m.sample_id: available[m.sample_id] for m in chosen if m.sample_id in available}
        self._like = self._like or generated.mine[0]

    def shared_out(self, members: Sequence[RolloutSample]) -> StepRollouts:
        """Return the selected samples with the same number on every replica. Collective."""
        assert self._like is not None, "keep_selected was not called"
        local = placed(self.world, members, self._owners, self._mine, self._like)
        return StepRollouts(members=members, mine=local, first=self.world.dp_rank * len(local), broken={})


def measured(choice: Choice, rewarded: Sequence[RewardedGroup], refills: int) -> dict[str, float]:
    """Return the metrics of the candidates and of the selection."""
    totals = [total for _, rewards in rewarded for total in rewards]
    valid = [total for total in totals if total is not None]
    stats = {
        "rollout/candidates": float(len(totals)),
        "rollout/candidates_failed": float(len(totals) - len(valid)),
        "rollout/refills": float(refills),
        "rollout/groups_dropped": float(choice.num_dropped),
    }
    return stats | ({"rollout/candidates_reward": math.fsum(valid) / len(valid)} if valid else {})
