"""Reinforcement learning, top to bottom. It knows no algorithm and no family by name."""

from __future__ import annotations

import itertools
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
    """One step is one RL step: samples of `source`, their rewards, and `updates_per_step` optimizer steps."""

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
        rewards = self.rewards_of(scores)
        generated = rollouts.rewarded  # where the step's samples were chosen: others than it trains on
        if generated is None:
            generated = rewarded_groups(rollouts.members, rewards.totals)
        self.source.groups.observe(step, generated)
        advantages, judged = self.judge(rollouts, scores, rewards)
        parts = self.algorithm.updates(rollouts, advantages.values, step)
        updates = [self.levelled(terms, self.current_in(u)) for u, terms in enumerate(parts)]
        if not any(update.terms for update in updates):  # levelled: all ranks have as many
            log.warning(
                "step %d: no sample of this step teaches anything: each failed, or was rewarded like all of its group",
                step,
            )
        recalled = self.recall(updates, rollouts)
        metrics = [self.optimize(update, rollouts, old) for update, old in zip(updates, recalled, strict=True)]
        judged |= self.move_policies()
        self.source.publish(step)  # the samples to come may be of these weights
        return StepReport(judged, metrics, samples=int(judged["rollout/samples"]))

    def own_state(self) -> dict[str, Any]:
        """Noise and noise levels follow from the step alone, the prompts from it and the state of the groups."""
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
        """Rewards of all samples, equal on every rank; of other samples where the recipe shuffles them."""
        rewards = step_rewards(scores, self.reward)
        if not self.reward.shuffle:
            return rewards
        order = keyed_permutation(len(scores), self.job.recipe.run.seed, "reward_shuffle", self.step)
        return rewards.reordered(order)

    def judge(
        self, rollouts: StepRollouts, scores: Sequence[dict[str, Score]], rewards: Rewards
    ) -> tuple[Advantages, dict[str, float]]:
        """Advantages of all samples, equal on every rank, and the reward metrics of the step."""
        groups = [m.group_id for m in rollouts.members]
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
        reasons = failure_reasons(scores)
        if failed:
            log.warning("step %d: %d of %d samples failed: %s", self.step, failed, len(totals), reasons)
        too_many = failed / len(totals) > self.reward.max_failed_fraction
        self.failing_steps = self.failing_steps + 1 if too_many else 0
        if self.failing_steps >= MAX_FAILING_STEPS:
            raise RunError(
                f"more than {self.reward.max_failed_fraction:.0%} of the samples had no reward in {self.failing_steps} "
                f"consecutive steps; the last reasons: {reasons}"
            )

    def recall(self, updates: Sequence[Update[Term]], rollouts: StepRollouts) -> list[list[Tensor]]:
        """Compute the predictions of the rollout's weights for every update after the first, which still has them. Only
        for an algorithm that compares with these weights and keeps no copy of them."""
        if not self.algorithm.recalls_old:
            return [[] for _ in updates]
        self.current.add("old")
        with self.job.timer("old_forward"):
            # In the batches of training: a GPU may pick other kernels for another batch size, and the ratio of two
            # equal policies would not be 1.
            size = self.job.recipe.engine.micro_batch_size
            shelf = Shelf(room(self.job.world.device, KEPT_SHARE))
            later = [self.micro_batches(update.terms, rollouts) for update in updates[1:]]
            return [[], *(self.predictions("old", micros, size, shelf) for micros in later)]

    def optimize(self, update: Update[Term], rollouts: StepRollouts, recalled: list[Tensor]) -> dict[str, float]:
        """One optimizer step on these terms of this replica; its metrics. Without any, no weight changes."""
        job, engine, terms = self.job, self.job.engine, update.terms
        if not terms:  # on any rank
            return engine_metrics(job, engine.skip())
        # Counted over all replicas before the first backward: one denominator for all micro-batches.
        num_terms = int(job.world.replica_sums({"terms": update.count})["terms"])
        micros = self.micro_batches(terms, rollouts)
        engine.expect(micros.num_backwards)
        references = self.reference_velocities(micros, recalled)
        surveys = self.survey(micros, references)
        with job.timer("train"):
            for i, micro in enumerate(micros):
                predictions = {policy: on_device(found[i], job.world.device) for policy, found in references.items()}
                micro = micro.told(surveys[i])
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

    def levelled(self, terms: Sequence[Term], current: Set[str]) -> Update[Term]:
        """The terms that train, and as many others as make all ranks run the same forwards; collective."""
        model, algorithm = self.job.model, self.algorithm
        num_experts, maxima = len(model.sigma_ranges), self.job.world.maxima
        return level(terms, model.expert_of, num_experts, maxima, lambda term: algorithm.has_gradient(term, current))

    def current_in(self, update: int) -> Set[str]:
        """The policies that certainly have the trained weights in this update of the step; equal on all ranks."""
        if update > 0:
            return frozenset()
        return self.current | ({"old"} if self.algorithm.recalls_old else set())

    def micro_batches(self, terms: Sequence[Term], rollouts: StepRollouts) -> MicroBatches[Term]:
        """The terms in the order of their forwards: at most engine.micro_batch_size in each, all of one expert
        and one number of parts."""
        job = self.job
        return MicroBatches(
            cut(terms, job.recipe.engine.micro_batch_size, job.model.expert_of),
            lambda part: self.algorithm.assemble(part, rollouts.mine, job.world.device),
            room(job.world.device, KEPT_SHARE, otherwise=KEPT_ON_HOST),
        )

    def reference_velocities(self, micros: MicroBatches[Term], recalled: list[Tensor]) -> dict[str, list[Tensor]]:
        """Predictions of the policies that the loss compares with, phase by phase: all of one policy, then the next."""
        references: dict[str, list[Tensor]] = {}
        shelf = Shelf(room(self.job.world.device, KEPT_SHARE))
        for policy in self.algorithm.references:
            if policy in self.current:
                continue  # equal weights give equal predictions: the loss detaches its own
            if policy == "old" and self.algorithm.recalls_old:
                references[policy] = recalled
                continue
            with self.job.timer(f"{policy}_forward"), self.job.engine.policy(policy):
                most = self.job.recipe.engine.max_forward_batch
                references[policy] = self.predictions(policy, micros.before_others(), most, shelf)
        return references

    @torch.no_grad()
    def survey(self, micros: MicroBatches[Term], references: dict[str, list[Tensor]]) -> list[Tensor | None]:
        """The sums over all replicas that the loss weighs its terms by, [B] for each micro-batch; collective. None for
        an algorithm without any."""
        if not self.algorithm.surveys:
            return [None] * len(micros)
        device, parts = self.job.world.device, list[Tensor]()
        with self.job.timer("survey_forward"):
            for i, micro in enumerate(micros.before_others()):  # in the batches of training, as in `recall`
                predictions = {policy: on_device(found[i], device) for policy, found in references.items()}
                part_B = self.algorithm.surveyed(self.velocity("survey", micro), micro.batch, predictions)
                parts.append(torch.where(micro.batch.weight > 0, part_B, 0))
        keys = [[self.algorithm.survey_key(term) for term in terms] for terms, _ in micros.cuts]
        mine, sums = defaultdict[str, float](float), defaultdict[str, float](float)
        for key, part in zip(itertools.chain(*keys), torch.cat(parts).tolist(), strict=True):
            mine[key] += part
        for of_replica in self.job.world.replica_gather(mine):
            for key, part in of_replica.items():
                sums[key] += part
        return [columns(device, [sums[key] for key in of_micro])[0] for of_micro in keys]

    @torch.no_grad()
    def predictions(self, purpose: str, micros: Iterable[MicroBatch], most: int, shelf: Shelf) -> list[Tensor]:
        """Predictions of the active policy by micro-batch; several share a forward of at most `most` terms. Those of
        hundreds of videos do not fit beside the model: the shelf puts some on the host."""
        found: list[Tensor] = []
        for group in folded((m.for_references() for m in micros), most):
            whole = shelf.put(self.velocity(purpose, MicroBatch.joined(group)))
            found += torch.split(whole, [len(m.batch.sigma) for m in group])
        return found

    def velocity(self, purpose: str, micro: MicroBatch) -> Tensor:
        """The prediction that the rollout sampled with, guided like it."""
        sampler, batch = self.job.sampler, micro.batch
        conditions = sampler.conditions(batch.prompts, batch.conditional_frames, batch.latents.shape[1:])
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
