"""The training loop on generated samples, for all RL and distillation algorithms and all model families."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.algorithms.advantages import Advantages, Rewards, combine_scores, reward_stats, reward_warnings
from wfm_ds.algorithms.base import LossTerm, Stats
from wfm_ds.errors import RunError
from wfm_ds.monitoring.run_data import ALARM_PREFIX
from wfm_ds.recipe.shared_defaults import DEFAULT_MAX_FAILED_FRACTION
from wfm_ds.rollout.groups import RolloutSource, StepRollouts, group_rewards
from wfm_ds.rollout.histories import history_metrics
from wfm_ds.rollout.rewards import summarize_failures
from wfm_ds.rollout.spread import measure_spread
from wfm_ds.runs.job import Job
from wfm_ds.seeds import draw_permutation
from wfm_ds.tensor_memory import OffloadBuffer, copy_to_device, free_memory, lists_to_device
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import StepReport, TrainingLoop
from wfm_ds.training.micro_batches import (
    GPU_BUFFER_FRACTION,
    HOST_CACHE_BYTES,
    MicroBatch,
    MicroBatches,
    Update,
    group_micro_batches,
    merge_part_stats,
    pad_across_ranks,
    split_into_micro_batches,
)
from wfm_ds.training.validation import Validator
from wfm_ds.types import DEFAULT_ADAPTER, Score

log = logging.getLogger(__name__)

MAX_FAILING_STEPS = 3
DISTANCE_EVERY = 10
References: TypeAlias = dict[str, dict[int, Tensor]]
"""{reference: {index of a micro-batch: prediction [B, ...]}}"""


class RlLoop(TrainingLoop):
    """Training loop on generated samples. Each step runs `updates_per_step` optimizer steps."""

    job: Job
    validator: Validator

    def __init__(
        self,
        job: Job,
        algorithm: RlAlgorithm,
        source: RolloutSource,
        validator: Validator,
        exporter: Exporter,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__(job, validator, exporter, checkpoints)
        self.algorithm, self.source = algorithm, source
        self.reward = job.recipe.reward if job.recipe.uses_rewards else None
        self.has_histories = job.recipe.rl.rollout.history.clips > 0
        self.has_teachers = bool(job.recipe.algorithm.list_teachers())
        self.failing_steps = 0  # consecutive steps with too many failed samples
        self.logged_warnings: set[str] = set()  # about rewards; a solved reward would repeat its warning in each step
        # Policies with weights equal to the trained ones: no forward pass is needed for them.
        self.equal_policies = algorithm.initial_equal_policies(job.recipe)
        self.copies_updated_at = 0  # number of optimizer steps at the last update of the copies

    def start(self) -> None:
        self.source.publish_policy(self.step)
        super().start()

    def final_warning(self) -> str:
        alarm = self.validator.alarm
        return f"{ALARM_PREFIX} {alarm.summary()}" if alarm.falling_rewards else ""

    def wait_for_data(self, step: int) -> bool:
        return self.source.wait_until_ready(step)

    def train_step(self, step: int) -> StepReport:
        with self.job.timer("rollout"):
            rollouts = self.source.collect_rollouts(step)
        with self.job.timer("reward_wait"):
            scores = self.source.collect_rewards(rollouts)
        rewards = self.compute_rewards(scores)
        groups = rollouts.group_rewards  # not None if the trained samples were selected from more generated samples
        if groups is None:
            groups = group_rewards(rollouts.samples, rewards.totals)
        self.source.groups.observe_rewards(step, groups)
        advantages, step_metrics = self.compute_advantages(rollouts, scores, rewards)
        terms_by_update = self.algorithm.updates(rollouts, advantages.values, step)
        updates = [self.pad_across_ranks(terms, self.find_equal_policies(u)) for u, terms in enumerate(terms_by_update)]
        if not any(update.terms for update in updates):  # the same on all ranks, because updates are padded
            log.warning("step %d: no gradient: every sample failed or its group has identical rewards", step)
        old_predictions = self.predict_with_old_weights(updates, rollouts)
        metrics = []
        for u, (update, predictions) in enumerate(zip(updates, old_predictions, strict=True)):
            metrics.append(self.optimize(update, rollouts, predictions, self.algorithm.choose_adapter(step, u)))
        step_metrics |= self.update_policy_copies()
        if self.has_teachers:
            step_metrics |= measure_spread(self.job.world, rollouts)
        self.source.publish_policy(step)  # later samples may be generated with these weights
        return StepReport(step_metrics, metrics, num_samples=int(step_metrics["rollout/samples"]))

    def extra_state(self) -> dict[str, Any]:
        return {
            "failing_steps": self.failing_steps,
            "current": sorted(self.equal_policies),
            "moved_at": self.copies_updated_at,
            "groups": self.source.groups.state_dict(),
        }

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.failing_steps = state["failing_steps"]
        self.equal_policies, self.copies_updated_at = set(state["current"]), state["moved_at"]
        self.source.groups.load_state_dict(state["groups"])

    def compute_rewards(self, scores: Sequence[dict[str, Score]]) -> Rewards:
        """Combine the scores of each sample into one reward, identically on every rank.

        If reward.shuffle is set, the rewards are shuffled between samples. In runs without rewards, the reward is 0, or
        None for a failed sample.
        """
        if self.reward is None:
            return Rewards([None if failures else 0.0 for failures in scores], [()] * len(scores), (), {})
        rewards = combine_scores(scores, self.reward)
        if not self.reward.shuffle:
            return rewards
        order = draw_permutation(len(scores), self.job.recipe.run.seed, "reward_shuffle", self.step)
        return rewards.reorder(order)

    def compute_advantages(
        self, rollouts: StepRollouts, scores: Sequence[dict[str, Score]], rewards: Rewards
    ) -> tuple[Advantages, dict[str, float]]:
        """Return the advantages of all samples and the reward metrics of the step, identical on every rank."""
        groups = [m.group_id for m in rollouts.samples]
        advantages = self.algorithm.compute_advantages(rewards, groups)
        self.check_failures(rewards.totals, scores)
        valid = sum(value is not None for value in advantages.values)
        stats = advantages.stats
        if self.reward is not None:
            stats = reward_stats(scores, groups, self.reward.functions) | stats
            for warning in reward_warnings(stats, self.reward.functions, len(scores)):
                if warning not in self.logged_warnings:
                    log.warning("step %d: %s", self.step, warning)
                self.logged_warnings.add(warning)
        if self.has_histories:
            names = [] if self.reward is None else [function.name for function in self.reward.functions]
            stats = stats | history_metrics(rollouts.samples, scores, names)
        stats = stats | self.source.step_metrics()
        return advantages, stats | {"rollout/samples": float(valid), "rollout/step": float(self.step)}

    def check_failures(self, totals: Sequence[float | None], scores: Sequence[dict[str, Score]]) -> None:
        """Log failed samples.

        Raises RunError if more than the fraction reward.max_failed_fraction fails in MAX_FAILING_STEPS consecutive
        steps.
        """
        limit = DEFAULT_MAX_FAILED_FRACTION if self.reward is None else self.reward.max_failed_fraction
        failed = sum(total is None for total in totals)
        reasons = summarize_failures(scores)
        if failed:
            log.warning("step %d: %d of %d samples failed: %s", self.step, failed, len(totals), reasons)
        too_many = failed / len(totals) > limit
        self.failing_steps = self.failing_steps + 1 if too_many else 0
        if self.failing_steps >= MAX_FAILING_STEPS:
            raise RunError(
                f"more than {limit:.0%} of samples failed in {self.failing_steps} "
                f"consecutive steps; last errors: {reasons}"
            )

    def predict_with_old_weights(
        self, updates: Sequence[Update[LossTerm]], rollouts: StepRollouts
    ) -> list[list[Tensor]]:
        """Predict the velocity of the loss terms with the current weights, before this RL step changes them.

        Returns one list per optimizer step, with one tensor per micro-batch. The first list is always empty. All lists
        are empty if the algorithm does not use old predictions.
        """
        if not self.algorithm.uses_old_predictions:
            return [[] for _ in updates]
        self.equal_policies.add("old")
        with self.job.timer("old_forward"):
            # Use the batch size of training: a GPU may choose different kernels for another batch size, and the ratio
            # of two policies with the same weights would not be 1.
            size = self.job.recipe.engine.micro_batch_size
            offload_buffer = self.make_offload_buffer()
            later = [self.micro_batches(update.terms, rollouts).iterate(release=True) for update in updates[1:]]
            # The first optimizer step runs with unchanged weights and needs no old predictions.
            return [[], *(self.predict_in_batches("old", micros, size, offload_buffer) for micros in later)]

    def optimize(
        self, update: Update[LossTerm], rollouts: StepRollouts, old_predictions: list[Tensor], adapter: str
    ) -> dict[str, float]:
        """Run one optimizer step of an adapter on this replica's loss terms, if any, and return its metrics."""
        job, engine, terms = self.job, self.job.engine, update.terms
        prefix = "" if adapter == DEFAULT_ADAPTER else f"{adapter}_"
        if not terms:  # the same on all ranks
            with engine.train_adapter(adapter):
                return engine.skip_step().metrics(prefix)
        # The loss denominator covers all replicas and micro-batches, so count before the first backward pass.
        num_terms = int(job.world.sum_over_replicas({"terms": update.total_weight})["terms"])
        micros = self.micro_batches(terms, rollouts)
        references = self.predict_references(micros, old_predictions)
        group_statistics = self.sum_group_statistics(micros, references)
        with engine.train_adapter(adapter):
            engine.expect_backwards(micros.num_backwards)
            with job.timer(f"{prefix}train"):
                for i, micro in enumerate(micros.iterate(release=True)):
                    predictions = self.select_predictions(references, i)
                    micro = micro.with_group_statistics(group_statistics[i])
                    part_stats: list[Stats] = []
                    for part in micro.parts():  # one backward pass per part, to store the activations of only one part
                        velocity = self.predict_velocity(f"{prefix}policy", part, passes=part.batch.passes)
                        loss_B, stats = self.algorithm.loss(velocity, part.batch, predictions)
                        engine.backward((loss_B * part.batch.weight).sum(), num_terms)
                        part_stats.append({"loss/total": loss_B.detach(), **stats})
                    self.meter.add(merge_part_stats(part_stats), micro.batch.weight)
            with job.timer("optimizer"):
                result = engine.step()
        if result.is_applied and adapter == DEFAULT_ADAPTER:
            with job.timer("optimizer"):
                engine.update_ema()
            self.equal_policies.clear()
        self.nonfinite_limit.check(result, [rollouts.local_rollouts[t.row].sample_id for t in terms], adapter)
        metrics = self.meter.collect(job.world)
        self.algorithm.check_metrics(metrics)
        if prefix:
            metrics[f"loss/{adapter}"] = metrics.pop("loss/total")
        return metrics | result.metrics(prefix)

    def pad_across_ranks(self, terms: Sequence[LossTerm], equal_policies: Set[str]) -> Update[LossTerm]:
        model, algorithm = self.job.model, self.algorithm
        num_experts, maxima = len(model.sigma_ranges), self.job.world.max_over_ranks
        return pad_across_ranks(
            terms,
            model.select_expert,
            num_experts,
            maxima,
            lambda term: algorithm.has_gradient(term, equal_policies),
            algorithm.num_teachers,
        )

    def find_equal_policies(self, update: int) -> Set[str]:
        """Return the policies that have the same weights as the trained policy before optimizer step `update`."""
        if update > 0:
            return frozenset()
        return self.equal_policies | ({"old"} if self.algorithm.uses_old_predictions else set())

    def micro_batches(self, terms: Sequence[LossTerm], rollouts: StepRollouts) -> MicroBatches[LossTerm]:
        job = self.job
        return MicroBatches(
            split_into_micro_batches(terms, job.recipe.engine.micro_batch_size, job.model.select_expert),
            functools.partial(self.algorithm.assemble, rollouts=rollouts.local_rollouts, device=job.world.device),
            free_memory(job.world.device, GPU_BUFFER_FRACTION, default=HOST_CACHE_BYTES),
        )

    def predict_references(self, micros: MicroBatches[LossTerm], old_predictions: list[Tensor]) -> References:
        """Return {reference: {index of a micro-batch: prediction}} for the micro-batches that need the reference.

        References with the same weights as the trained policy are omitted.
        """
        references: References = {}
        algorithm, offload_buffer = self.algorithm, self.make_offload_buffer()
        for name in algorithm.references:
            if name in self.equal_policies:
                continue  # the loss uses the trained policy's detached prediction instead
            if name == "old" and algorithm.uses_old_predictions:
                references[name] = dict(enumerate(old_predictions))
                continue
            chosen = [i for i, (terms, _) in enumerate(micros.splits) if algorithm.needs_reference(terms[0], name)]
            if not chosen:  # the same on all ranks
                continue
            policy, guidance = algorithm.reference_weights.get(name, name), algorithm.reference_guidance.get(name)
            with self.job.timer(f"{name}_forward"), self.job.engine.use_policy(policy):
                max_batch = self.job.recipe.engine.max_forward_batch
                passes = micros.iterate(release=False, chosen=chosen)
                predictions = self.predict_in_batches(name, passes, max_batch, offload_buffer, guidance)
            references[name] = dict(zip(chosen, predictions, strict=True))
        return references

    def select_predictions(self, references: References, index: int) -> dict[str, Tensor]:
        device = self.job.world.device
        return {
            name: copy_to_device(by_micro[index], device) for name, by_micro in references.items() if index in by_micro
        }

    def make_offload_buffer(self) -> OffloadBuffer:
        return OffloadBuffer(free_memory(self.job.world.device, GPU_BUFFER_FRACTION))

    @torch.no_grad()
    def sum_group_statistics(self, micros: MicroBatches[LossTerm], references: References) -> list[Tensor | None]:
        """Sum RlAlgorithm.group_statistics over the loss terms of each group on all replicas.

        All ranks must call this. Returns one tensor [B] per micro-batch of B loss terms, with the sum for each term's
        group. If the algorithm does not use group statistics, returns None for each micro-batch.
        """
        if not self.algorithm.uses_group_statistics:
            return [None] * len(micros)
        device, groups_by_micro, contributions = self.job.world.device, list[Sequence[str]](), list[Tensor]()
        with self.job.timer("group_statistics_forward"):
            # Use the batch size of training, as in `predict_with_old_weights`.
            for i, micro in enumerate(micros.iterate(release=False)):
                predictions = self.select_predictions(references, i)
                groups, values_B = self.algorithm.group_statistics(
                    micros.splits[i][0], self.predict_velocity("group_statistics", micro), micro.batch, predictions
                )
                groups_by_micro.append(groups)
                contributions.append(torch.where(micro.batch.weight > 0, values_B, 0))
        all_groups = [group for groups in groups_by_micro for group in groups]
        local_sums, sums = defaultdict[str, float](float), defaultdict[str, float](float)
        for group, value in zip(all_groups, torch.cat(contributions).tolist(), strict=True):
            local_sums[group] += value
        for replica_sums in self.job.world.gather_from_leaders(local_sums):
            for group, value in replica_sums.items():
                sums[group] += value
        return [lists_to_device(device, [sums[group] for group in groups])[0] for groups in groups_by_micro]

    @torch.no_grad()
    def predict_in_batches(
        self,
        purpose: str,
        micros: Iterable[MicroBatch],
        max_terms: int,
        offload_buffer: OffloadBuffer,
        guidance_scale: float | None = None,
    ) -> list[Tensor]:
        """Return one prediction of the active policy per micro-batch. A forward pass has at most `max_terms` terms."""
        predictions: list[Tensor] = []
        for group in group_micro_batches(micros, max_terms):
            velocity = offload_buffer.store(self.predict_velocity(purpose, MicroBatch.concat(group), guidance_scale))
            predictions += torch.split(velocity, [len(m.batch.sigma) for m in group])
        return predictions

    def predict_velocity(
        self,
        purpose: str,
        micro: MicroBatch,
        guidance_scale: float | None = None,
        passes: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Predict the velocity with the active policy.

        purpose: name under which the forward passes are counted. guidance_scale: None for the rollout's scale. passes:
        known predictions of guidance passes, see Sampler.predict_velocity.
        """
        sampler, batch = self.job.sampler, micro.batch
        conditions = sampler.encode_conditioning(
            batch.prompts,
            batch.conditioning_frames,
            batch.latents.shape[1:],
            guided=None if guidance_scale is None else guidance_scale != 1,
        )
        return sampler.predict_velocity(
            purpose, batch.latents, batch.sigma, conditions, micro.expert, guidance_scale=guidance_scale, known=passes
        )

    def update_policy_copies(self) -> dict[str, float]:
        """Move the policy copies towards the trained weights and return metrics. Call at the end of an RL step."""
        engine, metrics = self.job.engine, {}
        decays = self.algorithm.policy_decays(self.step, engine.num_updates)
        weights_changed = engine.num_updates > self.copies_updated_at
        for policy, decay in decays.items():
            if weights_changed:
                engine.update_policy(policy, decay)
                self.equal_policies |= {policy} if decay == 0 else set()
            metrics[f"{self.algorithm.area}/{policy}_decay"] = decay
            if self.step % DISTANCE_EVERY == 0:
                metrics[f"weights/{policy}_distance"] = engine.policy_distance(policy)
        if decays:
            self.copies_updated_at = engine.num_updates
        return metrics
