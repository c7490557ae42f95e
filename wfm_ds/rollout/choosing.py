"""Rollouts by the training ranks that generate more samples than they train on, and choose among them by their rewards.

`sampling.explore` chooses within groups: the best and the worst of many cheap candidates. `rollout.max_refills` chooses
groups: those that teach nothing are replaced by groups about further prompts. With both, a group is judged by its
candidates.
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
    """`next` generates and scores candidates, round by round, until it has what the step trains on."""

    def __init__(self, job: Job, groups: RefillableGroups, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        super().__init__(job, groups, rewards, algorithm)
        self.refillable = groups
        recipe = job.recipe
        self.explore, self.max_refills = recipe.sampling.explore, recipe.rl.rollout.max_refills
        self.num_candidates = self.explore.group_size if self.explore else self.group_size  # of a group
        self.regenerates = self.explore is not None and self.explore.regenerate
        self._cheap: FlowPlan | None = None  # the candidates', unless it is the rollout's
        cheap = recipe.sampling.of_candidates
        if cheap is not None and cheap.steps < recipe.sampling.steps:
            self._cheap = exploring_plan(cheap, job.model.rollout_sigmas(cheap))
        self._candidates: dict[str, Candidate] = {}  # of the step, by sample id
        self._stats: dict[str, float] = {}

    def next(self, step: int) -> StepRollouts:
        """Generate, choose, and generate again what is chosen if the recipe says so. Collective."""
        choice, rewarded = Choice(self.job.recipe.rl.rollout.prompts_per_step), list[RewardedGroup]()
        hold = Hold(self.job.world)
        self._candidates = {}
        attempt = 0
        while True:
            generated, rewards = self._round(step, attempt, choice)
            rewarded += rewarded_groups(generated.members, rewards.totals)
            if not self.regenerates:
                hold.take(generated, choice.members)
            if not choice.num_missing or attempt == self.max_refills:  # on all ranks: it follows from the scores
                break
            attempt += 1
        self._stats = measured(choice, rewarded, attempt)
        if self.regenerates:
            chosen = self.generate(choice.members, self.algorithm.plan(step))
        else:
            chosen = hold.shared_out(choice.members)
        return dataclasses.replace(chosen, rewarded=rewarded)

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        if not self.regenerates:
            return [self._candidates[m.sample_id].scores for m in rollouts.members]
        scores = super().scores(rollouts)
        explored = [self._candidates[m.sample_id].total for m in rollouts.members]
        totals = step_rewards(scores, self.job.recipe.rl.reward).totals
        correlation = correlation_in_groups(explored, totals, [m.group_id for m in rollouts.members])
        if correlation is not None:
            self._stats["rollout/regenerated_correlation"] = correlation
        return scores

    def stats(self) -> dict[str, float]:
        return super().stats() | self._stats

    def _round(self, step: int, attempt: int, choice: Choice) -> tuple[StepRollouts, Rewards]:
        """Generate and score as many groups as the choice lacks, and add them to it; what was generated, and the
        rewards by which it was chosen."""
        recipe = self.job.recipe
        groups = self.refillable.refill(step, attempt) if attempt else self.groups.groups(step)
        members = self.members(
            groups[: choice.num_missing], self.num_candidates, step, first_group=attempt * choice.num_groups
        )
        generated = self.generate(members, self._cheap or self.algorithm.plan(step))
        with self.job.timer("reward_wait"):
            scores = super().scores(generated)
        rewards = step_rewards(scores, recipe.rl.reward)
        if said := failure_reasons(scores):
            count = sum(total is None for total in rewards.totals)
            log.warning("step %d: %d of %d candidates have no reward: %s", step, count, len(scores), said)
        self._candidates |= {
            m.sample_id: Candidate(scores[i], rewards.totals[i]) for i, m in enumerate(generated.members)
        }
        if recipe.rl.reward.shuffle:  # a choice by true rewards would teach
            rewards = rewards.reordered(
                keyed_permutation(len(scores), recipe.run.seed, "candidate_shuffle", step, attempt)
            )
        group_ids = [m.group_id for m in members]
        kept, teaching = best_and_worst(rewards, group_ids, recipe.rl.algorithm, self.group_size)
        choice.add([members[i] for i in kept], teaching)
        return generated, rewards


@dataclass(frozen=True, slots=True)
class Candidate:
    """The scores of a sample that was generated to be chosen from."""

    scores: dict[str, Score]
    total: float | None


class Hold:
    """Samples that were generated and are chosen so far, each on the replica that generated it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._mine: dict[str, Rollout] = {}
        self._owners: dict[str, int] = {}
        self._like: Rollout | None = None  # one of each round's plan and shape

    def take(self, generated: StepRollouts, chosen: Sequence[RolloutSample]) -> None:
        """Take up the chosen ones of a round, and drop those that are chosen no longer. The first round has a sample of
        every replica."""
        for replica, share in enumerate(even_shares(len(generated.members), self.world.dp_size)):
            self._owners |= {generated.members[i].sample_id: replica for i in share}
        made = self._mine | {rollout.sample_id: rollout for rollout in generated.mine}
        self._mine = {m.sample_id: made[m.sample_id] for m in chosen if m.sample_id in made}
        self._like = self._like or generated.mine[0]

    def shared_out(self, members: Sequence[RolloutSample]) -> StepRollouts:
        """The chosen samples, equally many on every replica. Collective."""
        assert self._like is not None, "nothing was taken"
        mine = placed(self.world, members, self._owners, self._mine, self._like)
        return StepRollouts(members=members, mine=mine, first=self.world.dp_rank * len(mine), broken={})


def measured(choice: Choice, rewarded: Sequence[RewardedGroup], refills: int) -> dict[str, float]:
    """Metrics of what was generated to choose from."""
    totals = [total for _, rewards in rewarded for total in rewards]
    known = [total for total in totals if total is not None]
    stats = {
        "rollout/candidates": float(len(totals)),
        "rollout/candidates_failed": float(len(totals) - len(known)),
        "rollout/refills": float(refills),
        "rollout/groups_dropped": float(choice.num_dropped),
    }
    return stats | ({"rollout/candidates_reward": math.fsum(known) / len(known)} if known else {})
