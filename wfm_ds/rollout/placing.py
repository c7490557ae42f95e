"""Samples on their way to the replicas that train on them, where these are not the ones that generated them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from wfm_ds.distributed.world import World
from wfm_ds.rollout.members import RolloutSample
from wfm_ds.types import Rollout, Transition


def placed(
    world: World,
    members: Sequence[RolloutSample],
    owners: Mapping[str, int],
    mine: Mapping[str, Rollout],
    like: Rollout,
) -> list[Rollout]:
    """This replica's samples of `members`, whose number the replicas divide, in their order. Collective.

    owners: the replica of each sample by its id, equal on all ranks; mine: the samples of this one, by id; like: any
    sample of the same plan and shape, which has no data of its own.
    """
    count = len(members) // world.dp_size
    here: list[Rollout] = []
    for i, member in enumerate(members):  # every rank meets the moves in this order: nobody waits in a circle
        source, target = owners[member.sample_id], i // count
        if source == target == world.dp_rank:
            here.append(mine[member.sample_id])
        elif target == world.dp_rank:
            here.append(_filled(like, member, [world.moved(t, source, target) for t in _tensors(like)]))
        elif source == world.dp_rank:
            for tensor in _tensors(mine[member.sample_id]):
                world.moved(tensor, source, target)
    return here


def _tensors(rollout: Rollout) -> list[Tensor]:
    """Everything of a sample that was computed. A step that begins where the one before it ended has that memory."""
    tensors = [rollout.clean_latents]
    before: Transition | None = None
    for t in rollout.transitions:
        tensors += [] if _follows(t, before) else [t.latents]
        tensors += [t.next_latents, t.log_prob, *([] if t.mean is None else [t.mean])]
        before = t
    return [*tensors, *(rollout.states[k] for k in sorted(rollout.states))]


def _filled(like: Rollout, member: RolloutSample, tensors: Sequence[Tensor]) -> Rollout:
    """The sample that `_tensors` gave these of."""
    rest = iter(tensors)
    clean = next(rest)
    transitions: list[Transition] = []
    for t in like.transitions:
        before = transitions[-1] if transitions else None
        latents = before.next_latents if before is not None and _follows(t, before) else next(rest)
        next_latents, log_prob = next(rest), next(rest)
        mean = None if t.mean is None else next(rest)
        found = Transition(index=t.index, latents=latents, next_latents=next_latents, log_prob=log_prob, mean=mean)
        transitions.append(found)
    return dataclasses.replace(
        like,
        sample_id=member.sample_id,
        group_id=member.group_id,
        prompt=member.prompt,
        seed=member.seed,
        noise_seed=member.noise_seed,
        clean_latents=clean,
        transitions=transitions,
        states={k: next(rest) for k in sorted(like.states)},
    )


def _follows(transition: Transition, before: Transition | None) -> bool:
    return before is not None and transition.index == before.index + 1
