"""Rollouts by the training ranks themselves: a chunk is scored elsewhere while the next one is denoised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.chunks import chunks
from wfm_ds.job import Job
from wfm_ds.rollout.groups import Group, GroupSource
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.rollout.scores import Scores, gather_scores, submit_pictures
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.seeds import derive_seed
from wfm_ds.types import GivenLatents, Prompt, Rollout, Score, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sample to generate; its place and seed follow from (run seed, step, group, member), not from the rank."""

    sample_id: str
    group_id: str
    group: Group
    seed: int  # the sample's own
    noise_seed: int  # of its initial noise: its own too, or one for the whole group

    @property
    def prompt(self) -> Prompt:
        return self.group.prompt


def step_members(
    groups: Sequence[Group], *, group_size: int, step: int, run_seed: int, same_noise: bool = False
) -> list[Member]:
    """All samples of one RL step: group g holds `group_size` consecutive ones, which start from the same noise if the
    recipe says so."""
    members = []
    for g, group in enumerate(groups):
        group_id = f"{step}/{g}/{group.prompt.id}"
        shared = derive_seed(run_seed, "group_noise", step, g)
        for k in range(group_size):
            seed = derive_seed(run_seed, "init_noise", step, g, k)
            members.append(
                Member(
                    sample_id=f"{group_id}/{k}",
                    group_id=group_id,
                    group=group,
                    seed=seed,
                    noise_seed=shared if same_noise else seed,
                )
            )
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The samples of one RL step: those of this rank's replica, and who is in which group on all ranks."""

    members: Sequence[Member]  # of all ranks
    mine: Sequence[Rollout]  # equally many on every replica, a contiguous part of members
    first: int  # index of mine[0] among members
    broken: Scores  # named failures of this rank's samples whose latents are not finite


class ColocatedSource:
    """`next(step)` generates and submits media for scoring; `scores` waits for what is not scored yet."""

    def __init__(self, job: Job, groups: GroupSource, rewards: RewardClient, algorithm: RlAlgorithm) -> None:
        assert job.recipe.rollout is not None
        self.job, self.groups, self.rewards, self.algorithm = job, groups, rewards, algorithm
        self.group_size = job.recipe.rollout.group_size

    def next(self, step: int) -> StepRollouts:
        """Every rank calls; each denoises samples_per_rank samples in equal chunks under the rollout policy."""
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
                trajectory = job.generate(
                    [m.prompt for m in part],
                    [m.noise_seed for m in part],
                    plan,
                    purpose="rollout",
                    seeds=[m.seed for m in part],
                    given=given_latents([m.group for m in part]),
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


def given_latents(groups: Sequence[Group]) -> GivenLatents | None:
    """What samples of these groups are given; None if nothing."""
    if not any(group.num_given for group in groups):
        return None
    data = [group.data for group in groups if group.data is not None]
    return GivenLatents(torch.stack(data), torch.tensor([group.num_given for group in groups]))


def rolled_out(member: Member, trajectory: Trajectory, row: int, *, broken: bool) -> Rollout:
    """What is kept of one sample of a chunk."""
    keep = finite if broken else torch.Tensor.detach
    return Rollout(
        sample_id=member.sample_id,
        group_id=member.group_id,
        prompt=member.prompt,
        seed=member.seed,
        noise_seed=member.noise_seed,
        clean_latents=finite(trajectory.clean[row]),
        transitions=transitions(trajectory, row, broken=broken),
        states={k: keep(states[row]) for k, states in trajectory.states.items()},
        data=member.group.data,
        num_given=member.group.num_given,
    )


def transitions(trajectory: Trajectory, row: int, *, broken: bool) -> list[Transition]:
    """The stored steps of one sample. Views, unless it is broken: then copies with zeros for what is not finite."""
    keep = finite if broken else torch.Tensor.detach
    return [
        Transition(
            index=stored.index,
            latents=keep(stored.latents[row]),
            next_latents=keep(stored.next_latents[row]),
            log_prob=keep(stored.log_prob[row]),
            mean=None if stored.mean is None else keep(stored.mean[row]),
        )
        for stored in trajectory.stored
    ]


def finite(tensor: Tensor) -> Tensor:
    """A copy with zeros for what is not finite: NaN times weight 0 would be NaN."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)
