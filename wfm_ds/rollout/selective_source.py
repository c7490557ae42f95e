"""Rollouts on the training ranks that generate extra samples and select samples by reward.

`sampling.explore` generates many cheap candidate samples per group, and selects the best and the worst.
`rollout.max_refills` replaces each group with equal rewards by a group of another prompt. If both are set, the rewards
of the candidates decide whether a group is replaced.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Rewards, combine_scores, select_best_and_worst
from wfm_ds.chunks import even_ranges
from wfm_ds.distributed.world import World
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_ds.rollout.group_selection import GroupSelection, within_group_correlation
from wfm_ds.rollout.groups import RefillableGroups, RewardedGroup, RolloutSample, StepRollouts, group_rewards
from wfm_ds.rollout.replica_transfer import transfer_to_replicas
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import summarize_failures
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import FlowPlan
from wfm_ds.sampling.plan import exploration_plan
from wfm_ds.seeds import draw_permutation
from wfm_ds.types import Rollout, Score

log = logging.getLogger(__name__)


class SelectiveSource(ColocatedSource):
    """Generates and scores candidate samples in rounds, until the step has enough groups with different rewards."""

    def __init__(self, job: Job, groups: RefillableGroups, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        super().__init__(job, groups, rewards, algorithm)
        self.refillable_groups = groups
        recipe = job.recipe
        self.explore, self.max_refills = recipe.sampling.explore, recipe.rl.rollout.max_refills
        self.num_candidates = self.explore.group_size if self.explore else self.settings.group_size  # per group
        self.should_regenerate = self.explore is not None and self.explore.regenerate
        self._candidate_plan: FlowPlan | None = None  # None: candidates use the plan of the rollouts
        settings = recipe.sampling.candidate_sampling
        if settings is not None and settings.steps < recipe.sampling.steps:
            self._candidate_plan = exploration_plan(settings, job.model.rollout_sigmas(settings))
        self._candidates: dict[str, CandidateScores] = {}  # of the current step, by sample id
        self._selection_metrics: dict[str, float] = {}

    def collect_rollouts(self, step: int) -> StepRollouts:
        """Generate candidate samples and return the selected samples. Collective.

        With `sampling.explore.regenerate`, the selected samples are generated again with the usual sampling plan.
        """
        selection, candidate_groups = GroupSelection(self.settings.prompts_per_step), list[RewardedGroup]()
        selected = SelectedRollouts(self.job.world)
        self._candidates = {}
        attempt = 0
        while True:
            generated, rewards = self._generate_round(step, attempt, selection)
            candidate_groups += group_rewards(generated.samples, rewards.totals)
            if not self.should_regenerate:
                selected.keep_selected(generated, selection.selected_samples)
            if not selection.num_missing or attempt == self.max_refills:  # same on all ranks: depends on scores only
                break
            attempt += 1
        self._selection_metrics = selection_metrics(selection, candidate_groups, attempt)
        if self.should_regenerate:
            rollouts = self.generate_samples(selection.selected_samples, self.algorithm.plan(step))
        else:
            rollouts = selected.distribute_evenly(selection.selected_samples)
        return dataclasses.replace(rollouts, group_rewards=candidate_groups)

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        if not self.should_regenerate:
            return [self._candidates[m.sample_id].scores for m in rollouts.samples]
        scores = super().collect_rewards(rollouts)
        candidate_totals = [self._candidates[m.sample_id].total for m in rollouts.samples]
        totals = combine_scores(scores, self.job.recipe.rl.reward).totals
        correlation = within_group_correlation(candidate_totals, totals, [m.group_id for m in rollouts.samples])
        if correlation is not None:
            self._selection_metrics["rollout/regenerated_correlation"] = correlation
        return scores

    def step_metrics(self) -> dict[str, float]:
        return super().step_metrics() | self._selection_metrics

    def _generate_round(self, step: int, attempt: int, selection: GroupSelection) -> tuple[StepRollouts, Rewards]:
        """Generate and score the groups that the selection lacks, and add them to the selection.

        attempt: number of the round, starting at 0. Returns (generated samples, rewards used for the selection).
        """
        recipe = self.job.recipe
        groups = self.refillable_groups.refill_groups(step, attempt) if attempt else self.groups.step_groups(step)
        samples = self.plan_samples(
            groups[: selection.num_missing], self.num_candidates, step, first_group=attempt * selection.num_groups
        )
        generated = self.generate_samples(samples, self._candidate_plan or self.algorithm.plan(step))
        with self.job.timer("reward_wait"):
            scores = super().collect_rewards(generated)
        rewards = combine_scores(scores, recipe.rl.reward)
        if reasons := summarize_failures(scores):
            count = sum(total is None for total in rewards.totals)
            log.warning("step %d: %d of %d candidates have no reward: %s", step, count, len(scores), reasons)
        self._candidates |= {
            m.sample_id: CandidateScores(scores[i], rewards.totals[i]) for i, m in enumerate(generated.samples)
        }
        if recipe.rl.reward.shuffle:  # selecting by the true rewards would leak them into the control run
            rewards = rewards.reorder(
                draw_permutation(len(scores), recipe.run.seed, "candidate_shuffle", step, attempt)
            )
        group_ids = [m.group_id for m in samples]
        indices, informative = select_best_and_worst(rewards, group_ids, recipe.rl.algorithm, self.settings.group_size)
        selection.add_round([samples[i] for i in indices], informative)
        return generated, rewards


@dataclass(frozen=True, slots=True)
class CandidateScores:
    scores: dict[str, Score]
    total: float | None


class SelectedRollouts:
    """Rollouts selected so far.

    Each rollout stays on the replica that generated it until `distribute_evenly` is called.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._local_rollouts: dict[str, Rollout] = {}
        self._owner_replicas: dict[str, int] = {}
        self._template: Rollout | None = None  # any sample: all rounds have the same plan and shape

    def keep_selected(self, generated: StepRollouts, selected: Sequence[RolloutSample]) -> None:
        """Add the selected rollouts of a round, and delete rollouts that are no longer selected.

        Each replica must generate at least one sample in the first round.
        """
        for replica, shard in enumerate(even_ranges(len(generated.samples), self.world.dp_size)):
            self._owner_replicas |= {generated.samples[i].sample_id: replica for i in shard}
        available = self._local_rollouts | {rollout.sample_id: rollout for rollout in generated.local_rollouts}
        self._local_rollouts = {m.sample_id: available[m.sample_id] for m in selected if m.sample_id in available}
        self._template = self._template or generated.local_rollouts[0]

    def distribute_evenly(self, samples: Sequence[RolloutSample]) -> StepRollouts:
        """Move rollouts so that all replicas have equally many. Returns this replica's rollouts. Collective."""
        assert self._template is not None, "keep_selected was not called"
        local = transfer_to_replicas(self.world, samples, self._owner_replicas, self._local_rollouts, self._template)
        return StepRollouts(
            samples=samples, local_rollouts=local, first_index=self.world.dp_rank * len(local), failures={}
        )


def selection_metrics(
    selection: GroupSelection, candidate_groups: Sequence[RewardedGroup], refills: int
) -> dict[str, float]:
    """Return metrics of the candidate and of the selected samples. refills: number of additional sampling rounds."""
    totals = [total for _, rewards in candidate_groups for total in rewards]
    valid = [total for total in totals if total is not None]
    stats = {
        "rollout/candidates": float(len(totals)),
        "rollout/candidates_failed": float(len(totals) - len(valid)),
        "rollout/refills": float(refills),
        "rollout/groups_dropped": float(selection.num_dropped),
    }
    return stats | ({"rollout/candidates_reward": math.fsum(valid) / len(valid)} if valid else {})
