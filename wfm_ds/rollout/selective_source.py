"""Rollouts on the training ranks that generate more samples than needed and select samples by reward.

With `sampling.explore`, the best and the worst of many cheap candidate samples of a group are selected. With
`rollout.max_refills`, a group in which all samples have equal rewards is replaced by a group of another prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Sequence

import numpy as np
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Rewards, combine_scores, select_best_and_worst
from wfm_ds.chunks import even_ranges
from wfm_ds.distributed.world import World
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_ds.rollout.groups import (
    RefillableGroups,
    RewardedGroup,
    RolloutSample,
    StepRollouts,
    group_rewards,
    plan_samples,
)
from wfm_ds.rollout.rewards import RewardClient, summarize_failures
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import FlowPlan
from wfm_ds.sampling.plan import exploration_plan
from wfm_ds.seeds import draw_permutation
from wfm_ds.types import Rollout, Score, Transition

log = logging.getLogger(__name__)


class SelectiveSource(ColocatedSource):
    """Generates and scores candidates in rounds, until enough groups have samples with different rewards."""

    def __init__(self, job: Job, groups: RefillableGroups, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        super().__init__(job, groups, rewards, algorithm)
        self.refillable_groups = groups
        recipe = job.recipe
        self.explore, self.max_refills = recipe.sampling.explore, recipe.rl.rollout.max_refills
        advantages = recipe.rl.algorithm.advantages
        assert advantages is not None, "the recipe has rewards, which select the samples"
        self.advantages = advantages
        self.num_candidates = self.explore.group_size if self.explore else self.settings.group_size  # per group
        self.should_regenerate = self.explore is not None and self.explore.regenerate
        self._candidate_plan: FlowPlan | None = None  # None: candidates use the plan of the rollouts
        settings = recipe.sampling.candidate_sampling
        if settings is not None and settings.steps < recipe.sampling.steps:
            self._candidate_plan = exploration_plan(settings, job.model.rollout_sigmas(settings))
        # {sample id: (scores, total reward)} of the current step
        self._candidates: dict[str, tuple[dict[str, Score], float | None]] = {}
        self._selection_metrics: dict[str, float] = {}

    def collect_rollouts(self, step: int) -> StepRollouts:
        """Generate candidate samples and return the selected samples. All ranks must call this."""
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
            return [self._candidates[m.sample_id][0] for m in rollouts.samples]
        scores = super().collect_rewards(rollouts)
        candidate_totals = [self._candidates[m.sample_id][1] for m in rollouts.samples]
        totals = combine_scores(scores, self.job.recipe.rl.reward).totals
        correlation = within_group_correlation(candidate_totals, totals, [m.group_id for m in rollouts.samples])
        if correlation is not None:
            self._selection_metrics["rollout/regenerated_correlation"] = correlation
        return scores

    def step_metrics(self) -> dict[str, float]:
        return super().step_metrics() | self._selection_metrics

    def _generate_round(self, step: int, attempt: int, selection: GroupSelection) -> tuple[StepRollouts, Rewards]:
        """Generate and score candidates for the missing groups, and add the best and worst to `selection`.

        attempt: number of the round, starting at 0. Returns (candidates, rewards used for the selection).
        """
        recipe = self.job.recipe
        groups = self.refillable_groups.refill_groups(step, attempt) if attempt else self.groups.step_groups(step)
        first_group = attempt * selection.num_groups
        samples = plan_samples(
            recipe, groups[: selection.num_missing], step, self.num_candidates, first_group=first_group
        )
        generated = self.generate_samples(samples, self._candidate_plan or self.algorithm.plan(step))
        with self.job.timer("reward_wait"):
            scores = super().collect_rewards(generated)
        rewards = combine_scores(scores, recipe.rl.reward)
        if reasons := summarize_failures(scores):
            count = sum(total is None for total in rewards.totals)
            log.warning("step %d: %d of %d candidates have no reward: %s", step, count, len(scores), reasons)
        self._candidates |= {m.sample_id: (scores[i], rewards.totals[i]) for i, m in enumerate(generated.samples)}
        if recipe.rl.reward.shuffle:  # selecting by the true rewards would leak them into the control run
            rewards = rewards.reorder(
                draw_permutation(len(scores), recipe.run.seed, "candidate_shuffle", step, attempt)
            )
        group_ids = [m.group_id for m in samples]
        indices, informative = select_best_and_worst(rewards, group_ids, self.advantages, self.settings.group_size)
        selection.add_round([samples[i] for i in indices], informative)
        return generated, rewards


class SelectedRollouts:
    """Rollouts selected so far. Until `distribute_evenly`, each stays on the replica that generated it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._local_rollouts: dict[str, Rollout] = {}  # by sample id
        self._owner_replicas: dict[str, int] = {}  # {sample id: index of the replica}, identical on all ranks
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
        """Move rollouts between replicas until all replicas have equally many. Returns this replica's rollouts.

        All ranks must call this. samples: selected samples. Their number is a multiple of the number of replicas.
        """
        world, template, local, count = self.world, self._template, list[Rollout](), len(samples) // self.world.dp_size
        assert template is not None, "keep_selected was not called"
        for i, sample in enumerate(samples):  # all ranks transfer in the same order, which prevents deadlocks
            source, target = self._owner_replicas[sample.sample_id], i // count
            if source == target == world.dp_rank:
                local.append(self._local_rollouts[sample.sample_id])
            elif target == world.dp_rank:
                tensors = [world.transfer_tensor(t, source, target) for t in _list_tensors(template)]
                local.append(_fill_template(template, sample, tensors))
            elif source == world.dp_rank:
                for tensor in _list_tensors(self._local_rollouts[sample.sample_id]):
                    world.transfer_tensor(tensor, source, target)
        return StepRollouts(samples=samples, local_rollouts=local, first_index=world.dp_rank * count, failures={})


def selection_metrics(
    selection: GroupSelection, candidate_groups: Sequence[RewardedGroup], refills: int
) -> dict[str, float]:
    """Return metrics of the candidates and the selection. refills: number of additional sampling rounds."""
    totals = [total for _, rewards in candidate_groups for total in rewards]
    valid = [total for total in totals if total is not None]
    stats = {
        "rollout/candidates": float(len(totals)),
        "rollout/candidates_failed": float(len(totals) - len(valid)),
        "rollout/refills": float(refills),
        "rollout/groups_dropped": float(selection.num_dropped),
    }
    return stats | ({"rollout/candidates_reward": math.fsum(valid) / len(valid)} if valid else {})


class GroupSelection:
    """Groups selected so far for one RL step. A group is informative if its samples have different rewards."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups  # number of groups of an RL step
        self.num_dropped = 0  # number of groups that are not informative, whether replaced or not
        self._informative_groups: list[list[RolloutSample]] = []
        self._other_groups: list[list[RolloutSample]] = []

    @property
    def num_missing(self) -> int:
        return self.num_groups - len(self._informative_groups)

    def add_round(self, samples: Sequence[RolloutSample], informative: Collection[str]) -> None:
        """Add the samples of at most `num_missing` groups. informative: ids of the informative groups."""
        for group_id, group in itertools.groupby(samples, lambda sample: sample.group_id):
            (self._informative_groups if group_id in informative else self._other_groups).append(list(group))
        self.num_dropped = len(self._other_groups)

    @property
    def selected_samples(self) -> list[RolloutSample]:
        """Samples of the selected groups: first informative groups, then, if there are too few, other groups."""
        selected = [*self._informative_groups, *self._other_groups][: self.num_groups]
        return list(itertools.chain.from_iterable(selected))


def within_group_correlation(
    first: Sequence[float | None], second: Sequence[float | None], group_ids: Sequence[str]
) -> float | None:
    """Return Pearson's correlation of two rewards after subtraction of each group's mean reward.

    first, second: the two rewards of each sample. Samples with a missing reward are ignored. Returns None if no sample
    has both rewards, or if one of the rewards is constant within every group.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for a, b, group in zip(first, second, group_ids, strict=True):
        if a is not None and b is not None:
            pairs.setdefault(group, []).append((a, b))
    if not pairs:
        return None
    centred = np.concatenate([np.array(rewards) - np.mean(rewards, axis=0) for rewards in pairs.values()])
    norms = np.sqrt(np.square(centred).sum(axis=0))
    if not (norms > 1e-9 * max(1.0, float(np.abs(centred).max()))).all():
        return None
    return float((centred[:, 0] * centred[:, 1]).sum() / (norms[0] * norms[1]))


def _list_tensors(rollout: Rollout) -> list[Tensor]:
    tensors = [rollout.clean_latents]
    before: Transition | None = None
    for t in rollout.transitions:
        tensors += [] if _is_next_step(t, before) else [t.latents]
        tensors += [t.next_latents, t.log_prob, *([] if t.mean is None else [t.mean])]
        before = t
    return [*tensors, *(rollout.states[k] for k in sorted(rollout.states))]


def _fill_template(template: Rollout, sample: RolloutSample, tensors: Sequence[Tensor]) -> Rollout:
    """Return the rollout of `sample` with these tensors, in the order of `_list_tensors(template)`."""
    remaining = iter(tensors)
    clean = next(remaining)
    transitions: list[Transition] = []
    for t in template.transitions:
        before = transitions[-1] if transitions else None
        latents = before.next_latents if before is not None and _is_next_step(t, before) else next(remaining)
        next_latents, log_prob = next(remaining), next(remaining)
        mean = None if t.mean is None else next(remaining)
        transition = Transition(index=t.index, latents=latents, next_latents=next_latents, log_prob=log_prob, mean=mean)
        transitions.append(transition)
    return dataclasses.replace(
        template,
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt=sample.prompt,
        seed=sample.seed,
        noise_seed=sample.noise_seed,
        clean_latents=clean,
        transitions=transitions,
        states={k: next(remaining) for k in sorted(template.states)},
    )


def _is_next_step(transition: Transition, before: Transition | None) -> bool:
    return before is not None and transition.index == before.index + 1
