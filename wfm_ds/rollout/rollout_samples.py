"""The samples of an RL step: their ids, their seeds and their tensors. All rollout sources use this module."""

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
    """One sample to generate. Ids and seeds depend on run seed, step, group and index in the group, not on the rank."""

    sample_id: str
    group_id: str
    group: Group
    seed: int  # unique to the sample
    noise_seed: int  # seed of the initial noise: `seed`, or one value for the whole group

    @property
    def prompt(self) -> Prompt:
        return self.group.prompt


def plan_step_samples(
    groups: Sequence[Group],
    *,
    group_size: int,
    step: int,
    run_seed: int,
    same_noise: bool = False,
    first_group: int = 0,
) -> list[RolloutSample]:
    """Return the samples of one RL step, `group_size` consecutive samples per group.

    same_noise: the samples of a group start from the same noise. first_group: index of the first group; above 0 for
    additional groups of the step. A larger group_size adds samples without changing the ids and seeds of the others.
    """
    samples = []
    for g, group in enumerate(groups, start=first_group):
        group_id = f"{step}/{g}/{group.prompt.id}"
        group_seed = derive_seed(run_seed, "group_noise", step, g)
        for k in range(group_size):
            seed = derive_seed(run_seed, "init_noise", step, g, k)
            samples.append(
                RolloutSample(
                    sample_id=f"{group_id}/{k}",
                    group_id=group_id,
                    group=group,
                    seed=seed,
                    noise_seed=group_seed if same_noise else seed,
                )
            )
    return samples


def group_rewards(samples: Sequence[RolloutSample], rewards: Sequence[float | None]) -> list[RewardedGroup]:
    """Return [(group, rewards of its samples)]. rewards: one per sample, in the order of `samples`."""
    groups = {sample.group_id: sample.group for sample in samples}
    by_group: dict[str, list[float | None]] = {group_id: [] for group_id in groups}
    for sample, reward in zip(samples, rewards, strict=True):
        by_group[sample.group_id].append(reward)
    return [(group, by_group[group_id]) for group_id, group in groups.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """Samples of one RL step: descriptions of the samples of all ranks, and tensors of this replica's samples."""

    samples: Sequence[RolloutSample]  # of all ranks
    local_rollouts: Sequence[Rollout]  # of this replica's samples, which are contiguous in `samples`
    first_index: int  # index of the first local sample in `samples`
    failures: Scores  # failed Scores of local samples with non-finite latents
    group_rewards: Sequence[RewardedGroup] | None = None  # of all candidates, if `samples` was selected


def extract_rollout(sample: RolloutSample, trajectory: Trajectory, row: int, *, replace_nonfinite: bool) -> Rollout:
    """Return the Rollout of the sample at index `row` of its chunk's trajectory.

    replace_nonfinite: replace NaN and infinity by 0 in all tensors, not only in the clean latents.
    """
    convert = replace_nonfinite_values if replace_nonfinite else torch.Tensor.detach
    return Rollout(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt=sample.prompt,
        seed=sample.seed,
        noise_seed=sample.noise_seed,
        clean_latents=replace_nonfinite_values(trajectory.clean_latents[row]),
        transitions=extract_transitions(trajectory, row, replace_nonfinite=replace_nonfinite),
        states={k: convert(states[row]) for k, states in trajectory.states.items()},
        data_latents=sample.group.data,
        num_conditioning_frames=sample.group.num_conditioning_frames,
    )


def extract_transitions(trajectory: Trajectory, row: int, *, replace_nonfinite: bool) -> list[Transition]:
    """Return the stored denoising steps of the sample at index `row`: views, or copies with `replace_nonfinite`."""
    convert = replace_nonfinite_values if replace_nonfinite else torch.Tensor.detach
    return [
        Transition(
            index=stored.index,
            latents=convert(stored.latents[row]),
            next_latents=convert(stored.next_latents[row]),
            log_prob=convert(stored.log_prob[row]),
            mean=None if stored.mean is None else convert(stored.mean[row]),
        )
        for stored in trajectory.stored_steps
    ]


def replace_nonfinite_values(tensor: Tensor) -> Tensor:
    """Return a copy with non-finite values replaced by 0, because NaN times a loss weight of 0 is still NaN."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)
