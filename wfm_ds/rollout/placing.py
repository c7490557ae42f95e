"""Transfer of samples from the replicas that generated them to the replicas that train on them."""

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
    """Return this replica's shard of `samples`, in order. Collective.

    samples: samples of all replicas; their number is a multiple of the number of replicas.
    owners: replica that holds each sample, by sample id; identical on all ranks.
    local: the samples held by this replica, by sample id.
    template: any sample with the same plan and shape, without `data`.
    """
    count = len(members) // world.dp_size
    received: list[Rollout] = []
    for i, sample in enumerate(members):  # all ranks transfer in the same order, which prevents deadlocks
        source, target = owners[sample.sample_id], i // count
        if source == target == world.dp_rank:
            received.append(mine[sample.sample_id])
        elif target == world.dp_rank:
            received.append(_filled(like, sample, [world.moved(t, source, target) for t in _tensors(like)]))
        elif source == world.dp_rank:
            for tensor in _tensors(mine[sample.sample_id]):
                world.moved(tensor, source, target)
    return received


def _tensors(rollout: Rollout) -> list[Tensor]:
    """List the computed tensors of a sample. Latents shared by consecutive steps are listed once."""
    tensors = [rollout.clean_latents]
    before: Transition | None = None
    for t in rollout.transitions:
        tensors += [] if _follows(t, before) else [t.latents]
        tensors += [t.next_latents, t.log_prob, *([] if t.mean is None else [t.mean])]
        before = t
    return [*tensors, *(rollout.states[k] for k in sorted(rollout.states))]


def _filled(like: Rollout, member: RolloutSample, tensors: Sequence[Tensor]) -> Rollout:
    """Build a sample from the tensors of `_list_tensors`."""
    remaining = iter(tensors)
    clean = next(remaining)
    transitions: list[Transition] = []
    for t in like.transitions:
        before = transitions[-1] if transitions else None
        latents = before.next_latents if before is not None and _follows(t, before) else next(remaining)
        next_latents, log_prob = next(remaining), next(remaining)
        mean = None if t.mean is None else next(remaining)
        transition = Transition(index=t.index, latents=latents, next_latents=next_latents, log_prob=log_prob, mean=mean)
        transitions.append(transition)
    return dataclasses.replace(
        like,
        sample_id=member.sample_id,
        group_id=member.group_id,
        prompt=member.prompt,
        seed=member.seed,
        noise_seed=member.noise_seed,
        clean_latents=clean,
        transitions=transitions,
        states={k: next(remaining) for k in sorted(like.states)},
    )


def _follows(transition: Transition, before: Transition | None) -> bool:
    return before is not None and transition.index == before.index + 1
