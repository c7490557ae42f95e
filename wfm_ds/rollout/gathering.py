"""The frames that an RL step's samples are given, on the rank that sends work to the rollout workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from wfm_ds.models.conditional_frames import padded
from wfm_ds.rollout.groups import Group
from wfm_ds.run.job import Job


def gathered_frames(job: Job, groups: Sequence[Group]) -> list[Group]:
    """Return these groups with what each is given of its medium, in host memory, and nothing else of it, on rank 0;
    anything on other ranks.

    groups: all of a step, with the media that this replica read. Collective.
    """
    world = job.world
    here = next((group.data for group in groups if group.data is not None), None)
    if here is None or job.model.pinned(job.recipe.algorithm.num_conditional_frames)[1] == 0:
        return [dataclasses.replace(group, data=None) for group in groups]
    told: list[Group] = []
    for g, group in enumerate(groups):  # every rank meets the moves in this order: nobody waits in a circle
        owner = g * job.recipe.rl.rollout.group_size // job.derived.samples_per_rank  # the first replica that has it
        frames = (here if group.data is None else group.data)[:, : group.num_conditional_frames]
        if frames.numel() and owner and world.dp_rank in (0, owner):
            frames = world.moved(frames, owner, 0)
        told.append(dataclasses.replace(group, data=padded(frames.cpu(), here.shape[1])))
    return told
