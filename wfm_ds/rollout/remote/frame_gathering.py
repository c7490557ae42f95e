"""Gathers an RL step's conditioning frames on rank 0, which sends them to the rollout workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.rollout.groups import Group
from wfm_ds.runs.job import Job


def gather_conditioning_frames(job: Job, groups: Sequence[Group]) -> list[Group]:
    """Return copies of the groups on the CPU. Their `data` has only the conditioning frames. Collective.

    groups: all groups of the step. `data` is set for the groups that this replica has read. Only rank 0 may use the
    result.
    """
    world = job.world
    latents = next((group.data for group in groups if group.data is not None), None)
    if latents is None or job.model.clean_frame_range(job.recipe.algorithm.conditioning_frame_range)[1] == 0:
        return [dataclasses.replace(group, data=None) for group in groups]
    conditioned: list[Group] = []
    for g, group in enumerate(groups):  # all ranks transfer in the same order, which prevents deadlocks
        owner = g * job.recipe.rl.rollout.group_size // job.run_sizes.samples_per_rank  # the first replica that has it
        frames = (latents if group.data is None else group.data)[:, : group.num_conditioning_frames]
        if frames.numel() and owner and world.dp_rank in (0, owner):
            frames = world.transfer_tensor(frames, owner, 0)
        conditioned.append(dataclasses.replace(group, data=pad_num_frames(frames.cpu(), latents.shape[1])))
    return conditioned
