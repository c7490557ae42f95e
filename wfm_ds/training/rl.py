"""The RL training loop. Independent of algorithm and model family."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Advantages, Rewards, reward_stats, reward_warnings, step_rewards
from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.batch import Term
from wfm_ds.algorithms.terms import keyed_permutation
from wfm_ds.errors import RunError
from wfm_ds.pinned import Shelf, columns, on_device, room
from wfm_ds.rollout.base import Source
from wfm_ds.rollout.members import StepRollouts, rewarded_groups
from wfm_ds.rollout.scores import failure_reasons
from wfm_ds.run.job import Job
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import Loop
from wfm_ds.training.micro import (
    KEPT_ON_HOST,
    KEPT_SHARE,
    MicroBatch,
    MicroBatches,
    Update,
    cut,
    folded,
    joined_stats,
    level,
)
from wfm_ds.training.outcome import StepReport, engine_metrics
from wfm_ds.training.validation import Validator
from wfm_ds.types import Score

log = logging.getLogger(__name__)

MAX_FAILING_STEPS = 3
DISTANCE_EVERY = 10


class RlLoop(Loop):
    """RL training loop. One step: generate samples, compute their rewards, run `updates_per_step` optimizer steps."""

    job: Job
    validator: Validator

    def __init__(
        self,
        job: Job,
        algorithm: RlAlgorithm,
        source: Source,
        validator: Validator,
        exporter: Exporter,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__(job, validator, exporter, checkpoints)
        self.algorithm, self.source = algorithm, source
        self.reward = job.recipe.rl.reward
        self.failing_steps = 0  # consecutive steps with too many failed samples
        # Policies with weights equal to the trained ones: no forward pass is needed for them. The rollout policy
        # starts as a copy of the trained weights.
        self.current = {algorithm.rollout_policy}
        self.moved_at = 0  # number of optimizer steps at the last update of the copies

    def begin(self) -> None:
        self.source.publish(self.step)
        super().begin()

    def wait(self, step: int) -> bool:
        return self.source.wait(step)

    def train_on(self, step: int) -> StepReport:
        with self.job.timer("rollout"):
            rollouts = self.source.next(step)
        with self.job.timer("reward_wait"):
            scores = self.source.scores(rollouts)
        rewards = self.rewards_of(scores)
        groups = rollouts.rewarded  # set if the trained samples are a selection of all generated ones
        if groups is None:
            groups = rewarded_groups(rollouts.members, rewards.totals)
        self.source.groups.observe(step, groups)
        advantages, step_metrics = self.judge(rollouts, scores, rewards)
        terms_by_update = self.algorithm.updates(rollouts, advantages.values, step)
        updates = [self.levelled(terms, self.current_in(u)) for u, terms in enumerate(terms_by_update)]
        if not any(update.terms for update in updates):  # padded: the same on all ranks
            log.warning("step %d: no gradient: every sample failed or its group has identical rewards", step)
        old_predictions = self.recall(updates, rollouts)
        metrics = [self.optimize(update, rollouts, old) for update, old in zip(updates, old_predictions, strict=True)]
        step_metrics |= self.move_policies()
        self.source.publish(step)  # later samples may be generated with these weights
        return StepReport(step_metrics, metrics, samples=int(step_metrics["rollout/samples"]))

    def own_state(self) -> dict[str, Any]:
        """See the base class. Noise depends only on the step, prompts on the step and the state of the groups."""
        return {
            "failing_steps": self.failing_steps,
            "current": sorted(self.current),
            "moved_at": self.moved_at,
            "groups": self.source.groups.state(),
        }

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.failing_steps = state["failing_steps"]
        self.current, self.moved_at = set(state["current"]), state["moved_at"]
        self.source.groups.restore(state["groups"])

    def rewards_of(self, scores: Sequence[dict[str, Score]]) -> Rewards:
        """Combine scores into rewards of all samples, shuffled if reward.shuffle. Identical on every rank."""
        rewards = step_rewards(scores, self.reward)
        if not self.reward.shuffle:
            return rewards
        order = keyed_permutation(len(scores), self.job.recipe.run.seed, "reward_shuffle", self.step)
        return rewards.reordered(order)

    def judge(
        self, rollouts: StepRollouts, scores: Sequence[dict[str, Score]], rewards: Rewards
    ) -> tuple[Advantages, dict[str, float]]:
        """Compute advantages of all samples and reward metrics of the step. Identical on every rank."""
        groups = [m.group_id for m in rollouts.members]
        advantages = self.algorithm.advantages(rewards, groups)
        self.limit_failures(rewards.totals, scores)
        valid = sum(value is not None for value in advantages.values)
        stats = reward_stats(scores, groups, self.reward.functions) | advantages.stats
        for warning in reward_warnings(stats, self.reward.functions, len(scores)):
            log.warning("step %d: %s", self.step, warning)
        stats |= self.source.stats()
        return advantages, stats | {"rollout/samples": float(valid), "rollout/step": float(self.step)}

    def limit_failures(self, totals: Sequence[float | None], scores: Sequence[dict[str, Score]]) -> None:
        """Log failed samples. Raises RunError after MAX_FAILING_STEPS consecutive steps with too many of them."""
        failed = sum(total is None for total in totals)
        reasons = failure_reasons(scores)
        if failed:
            log.warning("step %d: %d of %d samples failed: %s", self.step, failed, len(totals), reasons)
        too_many = failed / len(totals) > self.reward.max_failed_fraction
        self.failing_steps = self.failing_steps + 1 if too_many else 0
        if self.failing_steps >= MAX_FAILING_STEPS:
            raise RunError(
                f"more than {self.reward.max_failed_fraction:.0%} of samples failed in {self.failing_steps} "
                f"consecutive steps; last errors: {reasons}"
            )

    def recall(self, updates: Sequence[Update[Term]], rollouts: StepRollouts) -> list[list[Tensor]]:
        """Predict with the rollout weights before they change, for all updates after the first.

        Only for algorithms that compare against the old policy without keeping a copy of it; others get empty lists.
        """
        if not self.algorithm.recalls_old:
            return [[] for _ in updates]
        self.current.add("old")
        with self.job.timer("old_forward"):
            # Use the batch size of training: a GPU may choose different kernels for another batch size, and the ratio
            # of two equal policies would not be 1.
            size = self.job.recipe.engine.micro_batch_size
            offload_buffer = self.make_offload_buffer()
            later = [self.micro_batches(update.terms, rollouts) for update in updates[1:]]
            return [
                [],
                *(self.predictions("old", micros.iterate(release=True), size, offload_buffer) for micros in later),
            ]

    def optimize(self, update: Update[Term], rollouts: StepRollouts, recalled: list[Tensor]) -> dict[str, float]:
        """Run one optimizer step on this replica's terms and return its metrics. Without terms the step is skipped."""
        job, engine, terms = self.job, self.job.engine, update.terms
        if not terms:  # the same on all ranks
            return engine_metrics(job, engine.skip())
        # The loss denominator covers all replicas and micro-batches, so count before the first backward pass.
        num_terms = int(job.world.replica_sums({"terms": update.count})["terms"])
        micros = self.micro_batches(terms, rollouts)
        engine.expect(micros.num_backwards)
        references = self.reference_velocities(micros, recalled)
        group_statistics = self.survey(micros, references)
        with job.timer("train"):
            for i, micro in enumerate(micros.iterate(release=True)):
                predictions = {name: on_device(tensors[i], job.world.device) for name, tensors in references.items()}
                micro = micro.with_group_statistics(group_statistics[i])
                part_stats: list[Stats] = []
                for part in micro.parts():  # one backward pass per part, to store the activations of only one part
                    velocity = self.velocity("policy", part)
                    loss_B, stats = self.algorithm.loss(velocity, part.batch, predictions)
                    engine.backward((loss_B * part.batch.weight).sum(), num_terms)
                    part_stats.append({"loss/total": loss_B.detach(), **stats})
                self.meter.add(joined_stats(part_stats), micro.batch.weight)
        with job.timer("optimizer"):
            result = engine.step()
            if result.applied:
                engine.update_ema()
                self.current.clear()
        self.finite.watch(result, [rollouts.mine[t.row].sample_id for t in terms])
        metrics = self.meter.collect(job.world)
        self.algorithm.review(metrics)
        return metrics | engine_metrics(job, result)

    def levelled(self, terms: Sequence[Term], current: Set[str]) -> Update[Term]:
        """Drop terms without gradient and pad with zero-weight terms so that all ranks run the same forward passes.

        Collective.
        """
        model, algorithm = self.job.model, self.algorithm
        num_experts, maxima = len(model.sigma_ranges), self.job.world.maxima
        return level(terms, model.expert_of, num_experts, maxima, lambda term: algorithm.has_gradient(term, current))

    def current_in(self, update: int) -> Set[str]:
        """Return the policies with weights equal to the trained ones at this update. Identical on every rank."""
        if update > 0:
            return frozenset()
        return self.current | ({"old"} if self.algorithm.recalls_old else set())

    def micro_batches(self, terms: Sequence[Term], rollouts: StepRollouts) -> MicroBatches[Term]:
        """Split the terms into micro-batches of at most engine.micro_batch_size terms."""
        job = self.job
        return MicroBatches(
            cut(terms, job.recipe.engine.micro_batch_size, job.model.expert_of),
            lambda part: self.algorithm.assemble(part, rollouts.mine, job.world.device),
            room(job.world.device, KEPT_SHARE, otherwise=KEPT_ON_HOST),
        )

    def reference_velocities(self, micros: MicroBatches[Term], recalled: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return the reference predictions of the loss, by policy and micro-batch. Runs one policy after the other."""
        references: dict[str, list[Tensor]] = {}
        offload_buffer = self.make_offload_buffer()
        for policy in self.algorithm.references:
            if policy in self.current:
                continue  # equal weights give equal predictions: the loss uses its own, detached
            if policy == "old" and self.algorithm.recalls_old:
                references[policy] = recalled
                continue
            with self.job.timer(f"{policy}_forward"), self.job.engine.policy(policy):
                max_batch = self.job.recipe.engine.max_forward_batch
                passes = micros.iterate(release=False)
                references[policy] = self.predictions(policy, passes, max_batch, offload_buffer)
        return references

    def make_offload_buffer(self) -> Shelf:
        """Create a buffer for predictions: GPU_BUFFER_FRACTION of the free GPU memory first, then the host."""
        gpu_bytes = room(self.job.world.device, KEPT_SHARE)
        return Shelf(gpu_bytes)

    @torch.no_grad()
    def survey(self, micros: MicroBatches[Term], references: dict[str, list[Tensor]]) -> list[Tensor | None]:
        """Sum `RlAlgorithm.group_statistics` per group over all replicas. Returns [B] per micro-batch, None if unused.

        Collective.
        """
        if not self.algorithm.uses_group_statistics:
            return [None] * len(micros)
        device, groups_by_micro, contributions = self.job.world.device, list[Sequence[str]](), list[Tensor]()
        with self.job.timer("survey_forward"):
            # Use the batch size of training, as in `predict_with_old_weights`.
            for i, micro in enumerate(micros.iterate(release=False)):
                predictions = {name: on_device(tensors[i], device) for name, tensors in references.items()}
                groups, values_B = self.algorithm.group_statistics(
                    micros.cuts[i][0], self.velocity("survey", micro), micro.batch, predictions
                )
                groups_by_micro.append(groups)
                contributions.append(torch.where(micro.batch.weight > 0, values_B, 0))
        all_groups = [group for groups in groups_by_micro for group in groups]
        local_sums, sums = defaultdict[str, float](float), defaultdict[str, float](float)
        for group, value in zip(all_groups, torch.cat(contributions).tolist(), strict=True):
            local_sums[group] += value
        for replica_sums in self.job.world.replica_gather(local_sums):
            for group, value in replica_sums.items():
                sums[group] += value
        return [columns(device, [sums[group] for group in groups])[0] for groups in groups_by_micro]

    @torch.no_grad()
    def predictions(self, purpose: str, micros: Iterable[MicroBatch], most: int, offload_buffer: Shelf) -> list[Tensor]:
        """Predict with the active policy, at most `max_terms` terms per forward. Returns one tensor per micro-batch.

        The offload buffer moves predictions that do not fit on the GPU to the host.
        """
        predictions: list[Tensor] = []
        for group in folded((m.for_references() for m in micros), most):
            velocity = offload_buffer.put(self.velocity(purpose, MicroBatch.joined(group)))
            predictions += torch.split(velocity, [len(m.batch.sigma) for m in group])
        return predictions

    def velocity(self, purpose: str, micro: MicroBatch) -> Tensor:
        """Predict the velocity of a micro-batch with the active policy, guided like the rollout."""
        sampler, batch = self.job.sampler, micro.batch
        conditions = sampler.conditions(batch.prompts, batch.conditional_frames, batch.latents.shape[1:])
        return sampler.velocity(purpose, batch.latents, batch.sigma, conditions, micro.expert)

    def move_policies(self) -> dict[str, float]:
        """Move the policy copies towards the trained weights. Called once per RL step; returns metrics."""
        engine, metrics = self.job.engine, {}
        decays = self.algorithm.moves(self.step, engine.num_updates)
        weights_changed = engine.num_updates > self.moved_at  # by an applied step since the last update of the copies
        for policy, decay in decays.items():
            if weights_changed:
                engine.update_policy(policy, decay)
                self.current |= {policy} if decay == 0 else set()
            metrics[f"{self.algorithm.area}/{policy}_decay"] = decay
            if self.step % DISTANCE_EVERY == 0:
                metrics[f"weights/{policy}_distance"] = engine.distance(policy)
        if decays:
            self.moved_at = engine.num_updates
        return metrics
