"""Rollouts by the training ranks themselves: a chunk is scored elsewhere while the next one is denoised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.chunks import chunks
from wfm_ds.rollout.groups import Group, GroupSource
from wfm_ds.rollout.members import StepRollouts, rolled_out, step_members
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import Scores, gather_scores, submit_pictures
from wfm_ds.run.job import Job
from wfm_ds.types import ConditionalFrames, Rollout, Score


class ColocatedSource:
    """`next(step)` generates and submits media for scoring; `scores` waits for what is not scored yet."""

    def __init__(self, job: Job, groups: GroupSource, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        self.job, self.groups, self.rewards, self.algorithm = job, groups, rewards, algorithm
        self.group_size = job.recipe.rl.rollout.group_size

    def publish(self, step: int) -> None:
        """The ranks that generate have the weights."""

    def wait(self, step: int) -> bool:
        """Return at once: `next` generates."""
        return True

    def stats(self) -> dict[str, float]:
        return self.groups.stats()

    def next(self, step: int) -> StepRollouts:
        """Generate the step's samples. Collective: each rank denoises samples_per_rank samples in equal chunks
        under the rollout policy."""
        job = self.job
        members = step_members(
            self.groups.groups(step),
            group_size=self.group_size,
            step=step,
            run_seed=job.recipe.run.seed,
            same_noise=job.recipe.sampling.same_noise,
        )
        count = job.derived.samples_per_rank
        first = job.world.dp_rank * count
        plan = self.algorithm.plan(step)
        rollouts: list[Rollout] = []
        broken: Scores = {}
        with job.engine.policy(self.algorithm.rollout_policy), torch.no_grad():
            for part in chunks(members[first : first + count], job.recipe.engine.max_forward_batch):
                trajectory = job.sampler.generate(
                    "rollout",
                    [m.prompt for m in part],
                    [m.noise_seed for m in part],
                    plan,
                    seeds=[m.seed for m in part],
                    conditional_frames=conditional_latents([m.group for m in part]),
                    shape=None if part[0].group.data is None else part[0].group.data.shape,  # one in an RL step
                )
                with job.timer("decode"):
                    ids = [m.sample_id for m in part]
                    broken |= submit_pictures(job, self.rewards, trajectory.clean, ids, [m.prompt for m in part])[1]
                rollouts += [rolled_out(m, trajectory, i, broken=m.sample_id in broken) for i, m in enumerate(part)]
        return StepRollouts(members=members, mine=rollouts, first=first, broken=broken)

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """{reward: Score} of every member on all ranks, in member order; collective."""
        by_id = gather_scores(self.job.world, self.rewards.wait() | rollouts.broken)
        return [by_id[m.sample_id] for m in rollouts.members]


def conditional_latents(groups: Sequence[Group]) -> ConditionalFrames | None:
    """Conditional latents that samples of these groups are given; None if they are given none."""
    if not any(group.num_conditional_frames for group in groups):
        return None
    data = [group.data for group in groups if group.data is not None]
    return ConditionalFrames(torch.stack(data), torch.tensor([group.num_conditional_frames for group in groups]))
