"""Rollouts on the training ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.chunks import even_ranges, split_into_chunks
from wfm_ds.engine.fp8_linear import use_fast_accumulation
from wfm_ds.rollout.groups import (
    Group,
    GroupSource,
    RolloutSample,
    StepRollouts,
    extract_rollout,
    plan_step_samples,
    stack_conditioning_frames,
)
from wfm_ds.rollout.histories import HistoryLayout, ReplicaHistories
from wfm_ds.rollout.rewards import RewardClient, gather_scores
from wfm_ds.rollout.scoring_queue import FiniteCheck, ScoringQueue
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import SamplingPlan, Trajectory
from wfm_ds.types import Score


class ColocatedSource:
    """Rollout source that generates the samples on the training ranks and sends them to the reward service."""

    def __init__(
        self,
        job: Job,
        groups: GroupSource,
        rewards: RewardClient | None,
        algorithm: RlAlgorithm,
        layout: HistoryLayout | None = None,
    ) -> None:
        """rewards: client of the reward service. None: the samples are neither decoded nor scored.

        layout: layout of histories and recordings. None: the run has neither.
        """
        self.job, self.groups, self.rewards, self.algorithm = job, groups, rewards, algorithm
        self.settings = job.recipe.rl.rollout
        self.histories = None if layout is None else ReplicaHistories(job, layout)
        self.scoring = FiniteCheck() if rewards is None else ScoringQueue(job, rewards)

    def publish_policy(self, step: int) -> None:
        """Do nothing, because the ranks that generate samples already have the weights."""

    def wait_until_ready(self, step: int) -> bool:
        return True

    def step_metrics(self) -> dict[str, float]:
        return self.groups.data_metrics()

    def collect_rollouts(self, step: int) -> StepRollouts:
        groups, plan = self.groups.step_groups(step), self.algorithm.plan(step)
        if self.histories is not None:
            with self.rollout_policy():
                groups = self.histories.start_samples(groups, plan)
        return self.generate_samples(self.plan_samples(groups, self.settings.group_size, step), plan)

    def plan_samples(
        self, groups: Sequence[Group], group_size: int, step: int, *, first_group: int = 0
    ) -> list[RolloutSample]:
        recipe = self.job.recipe
        return plan_step_samples(
            groups,
            group_size=group_size,
            step=step,
            run_seed=recipe.run.seed,
            same_noise=recipe.sampling.same_noise,
            first_group=first_group,
        )

    @contextlib.contextmanager
    def rollout_policy(self) -> Iterator[None]:
        """Use the rollout policy without gradients in the `with` block."""
        engine = self.job.engine
        with (
            engine.use_policy(self.algorithm.rollout_policy, merge=self.settings.merge_lora),
            engine.replay_graphs(),
            use_fast_accumulation(engine.module, not self.job.recipe.rl.algorithm.compares_log_probs),
            torch.no_grad(),
        ):
            yield

    def generate_samples(self, samples: Sequence[RolloutSample], plan: SamplingPlan) -> StepRollouts:
        """Denoise this replica's shard of the samples with the rollout policy and send it for scoring.

        All ranks must call this.
        """
        job = self.job
        shards = even_ranges(len(samples), job.world.dp_size)
        shard = shards[job.world.dp_rank]
        local = samples[shard.start : shard.stop]
        # All replicas must run the same number of forward passes.
        padded = [*local, *[samples[0]] * (len(shards[0]) - len(local))]
        trajectories: list[tuple[Sequence[RolloutSample], Trajectory]] = []
        with self.rollout_policy():
            for chunk in split_into_chunks(padded, job.recipe.engine.max_forward_batch):
                trajectory = job.sampler.generate(
                    "rollout",
                    [sample.prompt for sample in chunk],
                    [sample.noise_seed for sample in chunk],
                    plan,
                    seeds=[sample.seed for sample in chunk],
                    conditional_frames=stack_conditioning_frames([sample.group for sample in chunk]),
                    shape=None if chunk[0].group.data is None else chunk[0].group.data.shape,  # equal within an RL step
                    keep_passes=self.algorithm.keeps_passes,
                )
                unpadded = chunk[: max(0, len(local) - sum(len(earlier) for earlier, _ in trajectories))]
                trajectories.append((chunk, trajectory))
                if unpadded:
                    with job.timer("decode"):
                        clean = trajectory.clean_latents[: len(unpadded)]
                        ids, prompts = [s.sample_id for s in unpadded], [s.prompt for s in unpadded]
                        self.scoring.submit(clean, ids, prompts, [s.group.reference for s in unpadded])
        with job.timer("decode"):
            failures = self.scoring.flush()
        rollouts = [
            extract_rollout(sample, trajectory, row, replace_nonfinite=sample.sample_id in failures)
            for chunk, trajectory in trajectories
            for row, sample in enumerate(chunk)
        ]
        return StepRollouts(
            samples=samples, local_rollouts=rollouts[: len(local)], first_index=shard.start, failures=failures
        )

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        if self.rewards is None:
            failures = gather_scores(self.job.world, rollouts.failures)
            return [failures.get(m.sample_id, {}) for m in rollouts.samples]
        by_id = gather_scores(self.job.world, self.rewards.wait() | rollouts.failures)
        return [by_id[m.sample_id] for m in rollouts.samples]
