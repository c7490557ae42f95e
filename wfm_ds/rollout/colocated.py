"""Rollouts by the training ranks: a chunk is decoded and scored while the next chunk is denoised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.chunks import chunks, even_shares
from wfm_ds.rollout.groups import Group, GroupSource, conditional_latents
from wfm_ds.rollout.members import RolloutSample, StepRollouts, rolled_out, step_members
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import Submissions, gather_scores
from wfm_ds.run.job import Job
from wfm_ds.sampling.denoise import Plan, Trajectory
from wfm_ds.types import Score


class ColocatedSource:
    """Generates samples on the training ranks and submits them for scoring.

    `collect_rollouts` generates and submits; `collect_rewards` waits for the outstanding scores.
    """

    def __init__(self, job: Job, groups: GroupSource, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        self.job, self.groups, self.rewards, self.algorithm = job, groups, rewards, algorithm
        self.group_size = job.recipe.rl.rollout.group_size

    def publish(self, step: int) -> None:
        """Do nothing: the generating ranks already have the weights."""

    def wait(self, step: int) -> bool:
        """Return True at once: `collect_rollouts` generates the samples."""
        return True

    def stats(self) -> dict[str, float]:
        return self.groups.stats()

    def next(self, step: int) -> StepRollouts:
        """Generate this replica's share of the step. Collective."""
        samples = self.members(self.groups.groups(step), self.group_size, step)
        return self.generate(samples, self.algorithm.plan(step))

    def members(
        self, groups: Sequence[Group], group_size: int, step: int, *, first_group: int = 0
    ) -> list[RolloutSample]:
        """Plan `group_size` samples for each group. `first_group` is the number of the first group within the step."""
        recipe = self.job.recipe
        return step_members(
            groups,
            group_size=group_size,
            step=step,
            run_seed=recipe.run.seed,
            same_noise=recipe.sampling.same_noise,
            first_group=first_group,
        )

    def generate(self, members: Sequence[RolloutSample], plan: Plan) -> StepRollouts:
        """Denoise this replica's share of these samples with the rollout policy and submit it for scoring.

        Finished chunks are decoded and sent to the reward service while the next chunk is denoised. All replicas
        denoise the same number of samples in equal chunks: replicas with a smaller share repeat the first sample as
        padding. Collective.
        """
        job = self.job
        shards = even_shares(len(members), job.world.dp_size)
        shard = shards[job.world.dp_rank]
        local = members[shard.start : shard.stop]
        padded = [*local, *[members[0]] * (len(shards[0]) - len(local))]
        trajectories: list[tuple[Sequence[RolloutSample], Trajectory]] = []
        scoring = Submissions(job, self.rewards)
        merge = job.recipe.rl.rollout.merge_lora
        with job.engine.policy(self.algorithm.rollout_policy, merge=merge), job.engine.replayed(), torch.no_grad():
            for chunk in chunks(padded, job.recipe.engine.max_forward_batch):
                trajectory = job.sampler.generate(
                    "rollout",
                    [sample.prompt for sample in chunk],
                    [sample.noise_seed for sample in chunk],
                    plan,
                    seeds=[sample.seed for sample in chunk],
                    conditional_frames=conditional_latents([sample.group for sample in chunk]),
                    shape=None if chunk[0].group.data is None else chunk[0].group.data.shape,  # equal within an RL step
                )
                unpadded = chunk[: max(0, len(local) - sum(len(earlier) for earlier, _ in trajectories))]
                trajectories.append((chunk, trajectory))
                if unpadded:
                    with job.timer("decode"):
                        clean = trajectory.clean[: len(unpadded)]
                        scoring.add(clean, [s.sample_id for s in unpadded], [s.prompt for s in unpadded])
        with job.timer("decode"):
            failures = scoring.close()
        rollouts = [
            rolled_out(sample, trajectory, row, broken=sample.sample_id in failures)
            for chunk, trajectory in trajectories
            for row, sample in enumerate(chunk)
        ]
        return StepRollouts(members=members, mine=rollouts[: len(local)], first=shard.start, broken=failures)

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """Wait for the outstanding scores and gather them. Same order on every rank. Collective."""
        by_id = gather_scores(self.job.world, self.rewards.wait() | rollouts.broken)
        return [by_id[m.sample_id] for m in rollouts.members]
