"""Rollouts by the training ranks themselves: a chunk is scored elsewhere while the next one is denoised."""

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
        """Generate the step's samples. Collective."""
        members = self.members(self.groups.groups(step), self.group_size, step)
        return self.generate(members, self.algorithm.plan(step))

    def members(
        self, groups: Sequence[Group], group_size: int, step: int, *, first_group: int = 0
    ) -> list[RolloutSample]:
        """So many samples of each of these groups, whose numbers in the step begin with `first_group`."""
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
        """Denoise this replica's share of these samples under the rollout policy, and submit it to be scored.

        Collective: all replicas denoise equally many in equal chunks, those whose share is smaller the first sample
        once more."""
        job = self.job
        shares = even_shares(len(members), job.world.dp_size)
        mine = shares[job.world.dp_rank]
        here = members[mine.start : mine.stop]
        rows = [*here, *[members[0]] * (len(shares[0]) - len(here))]
        made: list[tuple[Sequence[RolloutSample], Trajectory]] = []
        submissions = Submissions(job, self.rewards)
        merge = job.recipe.rl.rollout.merge_lora
        with job.engine.policy(self.algorithm.rollout_policy, merge=merge), job.engine.replayed(), torch.no_grad():
            for part in chunks(rows, job.recipe.engine.max_forward_batch):
                trajectory = job.sampler.generate(
                    "rollout",
                    [m.prompt for m in part],
                    [m.noise_seed for m in part],
                    plan,
                    seeds=[m.seed for m in part],
                    conditional_frames=conditional_latents([m.group for m in part]),
                    shape=None if part[0].group.data is None else part[0].group.data.shape,  # one in an RL step
                )
                wanted = part[: max(0, len(here) - sum(len(p) for p, _ in made))]
                made.append((part, trajectory))
                if wanted:
                    with job.timer("decode"):
                        clean = trajectory.clean[: len(wanted)]
                        submissions.add(clean, [m.sample_id for m in wanted], [m.prompt for m in wanted])
        with job.timer("decode"):
            broken = submissions.close()
        rollouts = [
            rolled_out(m, trajectory, i, broken=m.sample_id in broken)
            for part, trajectory in made
            for i, m in enumerate(part)
        ]
        return StepRollouts(members=members, mine=rollouts[: len(here)], first=mine.start, broken=broken)

    def scores(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        """{reward: Score} of every member on all ranks, in member order; collective."""
        by_id = gather_scores(self.job.world, self.rewards.wait() | rollouts.broken)
        return [by_id[m.sample_id] for m in rollouts.members]
