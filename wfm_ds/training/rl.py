"""Reinforcement learning, top to bottom. It knows no algorithm and no family by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Advantages, reward_stats, reward_warnings, step_rewards
from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.batch import Term
from wfm_ds.algorithms.terms import keyed_permutation
from wfm_ds.errors import RunError
from wfm_ds.rollout.base import Source
from wfm_ds.rollout.members import StepRollouts
from wfm_ds.run.job import Job
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import Loop
from wfm_ds.training.micro import MicroBatch, MicroBatches, cut, folded, joined_stats, level
from wfm_ds.training.outcome import StepReport, engine_metrics
from wfm_ds.training.validation import Validator
from wfm_ds.types import Score

log = logging.getLogger(__name__)

MAX_FAILING_STEPS = 3
NUM_REASONS = 5  # of failed rewards, named in a log line
DISTANCE_EVERY = 10


class RlLoop(Loop):
    """One step is one RL step: samples of `source`, their rewards, and `updates_per_step` optimizer steps."""

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
        self.failing_steps = 0  # in a row
        # Policies whose weights are the trained ones, so that their predictions are too. The one that rolls out starts
        # as a copy of them.
        self.current = {algorithm.rollout_policy}
        self.moved_at = 0  # the optimizer step after which copies moved last

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
        advantages, judged = self.judge(rollouts, scores)
        updates = [self.levelled(terms) for terms in self.algorithm.updates(rollouts, advantages.values, step)]
        if not any(updates):  # levelled: all ranks have as many
            log.warning(
                "step %d: no sample of this step teaches anything: each failed, or was rewarded like all of its group",
                step,
            )
        recalled = self.recall(updates, rollouts)
        metrics = [self.optimize(terms, rollouts, old) for terms, old in zip(updates, recalled, strict=True)]
        judged |= self.move_policies()
        self.source.publish(step)  # the samples to come may be of these weights
        return StepReport(judged, metrics, samples=int(judged["rollout/samples"]))

    def own_state(self) -> dict[str, Any]:
        """Prompts, noise and noise levels follow from the step alone."""
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

    def judge(self, rollouts: StepRollouts, scores: Sequence[dict[str, Score]]) -> tuple[Advantages, dict[str, float]]:
        """Advantages of all samples, equal on every rank, and the reward metrics of the step."""
        groups = [m.group_id for m in rollouts.members]
        rewards = step_rewards(scores, self.reward)
        if self.reward.shuffle:
            order = keyed_permutation(len(scores), self.job.recipe.run.seed, "reward_shuffle", self.step)
            rewards = rewards.reordered(order)
        advantages = self.algorithm.advantages(rewards, groups)
        self.limit_failures(rewards.totals, scores)
        valid = sum(value is not None for value in advantages.values)
        stats = reward_stats(scores, groups, self.reward.functions) | advantages.stats
        for sentence in reward_warnings(stats, self.reward.functions, len(scores)):
            log.warning("step %d: %s", self.step, sentence)
        stats |= self.source.stats()
        return advantages, stats | {"rollout/samples": float(valid), "rollout/step": float(self.step)}

    def limit_failures(self, totals: Sequence[float | None], scores: Sequence[dict[str, Score]]) -> None:
        failed = sum(total is None for total in totals)
        failures = [score for by_reward in scores for score in by_reward.values() if score.failure]
        reasons = sorted({f"{score.reward}: {score.failure}" for score in failures})[:NUM_REASONS]
        if failed:
            log.warning("step %d: %d of %d samples failed: %s", self.step, failed, len(totals), "; ".join(reasons))
        too_many = failed / len(totals) > self.reward.max_failed_fraction
        self.failing_steps = self.failing_steps + 1 if too_many else 0
        if self.failing_steps >= MAX_FAILING_STEPS:
            raise RunError(
                f"more than {self.reward.max_failed_fraction:.0%} of the samples had no reward in {self.failing_steps} "
                f"consecutive steps; the last reasons: {'; '.join(reasons)}"
            )

    def recall(self, parts: Sequence[Sequence[Term]], rollouts: StepRollouts) -> list[list[Tensor]]:
        """Compute the predictions of the rollout's weights for every update after the first, which still has them. Only
        for an algorithm that compares with these weights and keeps no copy of them."""
        if not self.algorithm.recalls_old:
            return [[] for _ in parts]
        self.current.add("old")
        with self.job.timer("old_forward"):
            # In the batches of training: a GPU may pick other kernels for another batch size, and the ratio of two
            # equal policies would not be 1.
            size = self.job.recipe.engine.micro_batch_size
            return [[], *(self.predictions("old", self.micro_batches(terms, rollouts), size) for terms in parts[1:])]

    def optimize(self, terms: Sequence[Term], rollouts: StepRollouts, recalled: list[Tensor]) -> dict[str, float]:
        """One optimizer step on these terms of this replica, levelled; its metrics. Without any, no weight changes."""
        job, engine = self.job, self.job.engine
        if not terms:  # on any rank
            return engine_metrics(job, engine.skip())
        # Counted over all replicas before the first backward: one denominator for all micro-batches.
        num_terms = int(job.world.replica_sums({"terms": sum(t.weight for t in terms)})["terms"])
        micros = self.micro_batches(terms, rollouts)
        engine.expect(micros.num_backwards)
        references = self.reference_velocities(micros, recalled)
        with job.timer("train"):
            for i, micro in enumerate(micros):
                predictions = {policy: found[i].to(job.world.device) for policy, found in references.items()}
                of_parts: list[Stats] = []
                for part in micro.parts():  # a backward each, so that the activations of one are kept at a time
                    velocity = self.velocity("policy", part)
                    loss_B, stats = self.algorithm.loss(velocity, part.batch, predictions)
                    engine.backward((loss_B * part.batch.weight).sum(), num_terms)
                    of_parts.append({"loss/total": loss_B.detach(), **stats})
                self.meter.add(joined_stats(of_parts), micro.batch.weight)
        with job.timer("optimizer"):
            result = engine.step()
            if result.applied:
                engine.update_ema()
                self.current.clear()
        self.finite.watch(result, [rollouts.mine[t.row].sample_id for t in terms])
        metrics = self.meter.collect(job.world)
        self.algorithm.review(metrics)
        return metrics | engine_metrics(job, result)

    def levelled(self, terms: Sequence[Term]) -> list[Term]:
        """The terms that train, and as many others as make all ranks run the same forwards; collective."""
        model = self.job.model
        return level(terms, model.expert_of, len(model.sigma_ranges), self.job.world.maxima)

    def micro_batches(self, terms: Sequence[Term], rollouts: StepRollouts) -> MicroBatches[Term]:
        """The terms in the order of their forwards: at most engine.micro_batch_size in each, all of one expert
        and one number of parts."""
        job = self.job
        return MicroBatches(
            cut(terms, job.recipe.engine.micro_batch_size, job.model.expert_of),
            lambda part: self.algorithm.assemble(part, rollouts.mine, job.world.device),
        )

    def reference_velocities(self, micros: MicroBatches[Term], recalled: list[Tensor]) -> dict[str, list[Tensor]]:
        """Predictions of the policies that the loss compares with, phase by phase: all of one policy, then the next."""
        references: dict[str, list[Tensor]] = {}
        for policy in self.algorithm.references:
            if policy in self.current:
                continue  # equal weights give equal predictions: the loss detaches its own
            if policy == "old" and self.algorithm.recalls_old:
                references[policy] = recalled
                continue
            with self.job.timer(f"{policy}_forward"), self.job.engine.policy(policy):
                most = self.job.recipe.engine.max_forward_batch
                references[policy] = self.predictions(policy, micros, most)
        return references

    @torch.no_grad()
    def predictions(self, purpose: str, micros: MicroBatches[Term], most: int) -> list[Tensor]:
        """Predictions of the active policy by micro-batch; several share a forward of at most `most` terms. They lie on
        the host: those of hundreds of videos do not fit beside the model."""
        found: list[Tensor] = []
        for group in folded((m.for_references() for m in micros), most):
            whole = self.velocity(purpose, MicroBatch.joined(group)).cpu()
            found += torch.split(whole, [len(m.batch.sigma) for m in group])
        return found

    def velocity(self, purpose: str, micro: MicroBatch) -> Tensor:
        """The prediction that the rollout sampled with, guided like it."""
        sampler, batch = self.job.sampler, micro.batch
        conditions = sampler.conditions(batch.prompts, batch.conditional_frames)
        return sampler.velocity(purpose, batch.latents, batch.sigma, conditions, micro.expert)

    def move_policies(self) -> dict[str, float]:
        """The copies that follow the trained weights, at the end of an RL step."""
        engine, metrics = self.job.engine, {}
        moves = self.algorithm.moves(self.step, engine.num_updates)
        stepped = engine.num_updates > self.moved_at  # without an applied step since, there is nothing to follow
        for policy, decay in moves.items():
            if stepped:
                engine.update_policy(policy, decay)
                self.current |= {policy} if decay == 0 else set()
            metrics[f"{self.algorithm.area}/{policy}_decay"] = decay
            if self.step % DISTANCE_EVERY == 0:
                metrics[f"weights/{policy}_distance"] = engine.distance(policy)
        if moves:
            self.moved_at = engine.num_updates
        return metrics
