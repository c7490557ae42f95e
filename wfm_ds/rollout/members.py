"""The samples of an RL step, whoever generates them: who they are, and what is kept of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfm_ds.rollout.groups import Group, RewardedGroup
from wfm_ds.rollout.scores import Scores
from wfm_ds.sampling.denoise import Trajectory
from wfm_ds.seeds import derive_seed
from wfm_ds.types import Prompt, Rollout, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
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
    groups: Sequence[Group],
    *,
    group_size: int,
    step: int,
    run_seed: int,
    same_noise: bool = False,
    first_group: int = 0,
) -> list[RolloutSample]:
    """All samples of one RL step: group g holds `group_size` consecutive ones, which start from the same noise if the
    recipe says so. first_group: the number of the first group, above 0 for further groups of the step.

    A larger group has the same first members."""
    members = []
    for g, group in enumerate(groups, start=first_group):
        group_id = f"{step}/{g}/{group.prompt.id}"
        shared = derive_seed(run_seed, "group_noise", step, g)
        for k in range(group_size):
            seed = derive_seed(run_seed, "init_noise", step, g, k)
            members.append(
                RolloutSample(
                    sample_id=f"{group_id}/{k}",
                    group_id=group_id,
                    group=group,
                    seed=seed,
                    noise_seed=shared if same_noise else seed,
                )
            )
    return members


def rewarded_groups(members: Sequence[RolloutSample], rewards: Sequence[float | None]) -> list[RewardedGroup]:
    """Return the groups of an RL step with the rewards of their samples, which are given by member."""
    groups = {member.group_id: member.group for member in members}
    found: dict[str, list[float | None]] = {group_id: [] for group_id in groups}
    for member, reward in zip(members, rewards, strict=True):
        found[member.group_id].append(reward)
    return [(group, found[group_id]) for group_id, group in groups.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The samples of one RL step: those of this rank's replica, and who is in which group on all ranks."""

    members: Sequence[RolloutSample]  # of all ranks
    mine: Sequence[Rollout]  # equally many on every replica, a contiguous part of members
    first: int  # index of mine[0] among members
    broken: Scores  # named failures of this rank's samples whose latents are not finite
    rewarded: Sequence[RewardedGroup] | None = None  # all that members were chosen from; None: they are all there is


def rolled_out(member: RolloutSample, trajectory: Trajectory, row: int, *, broken: bool) -> Rollout:
    """Return the parts of one sample of a chunk that are kept."""
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
        num_conditional_frames=member.group.num_conditional_frames,
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
