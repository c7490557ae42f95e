"""Transfers samples from the replicas that generated them to the replicas that train on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from wfm_ds.distributed.world import World
from wfm_ds.rollout.groups import RolloutSample
from wfm_ds.types import Rollout, Transition


def transfer_to_replicas(
    world: World,
    samples: Sequence[RolloutSample],
    owners: Mapping[str, int],
    local: Mapping[str, Rollout],
    template: Rollout,
) -> list[Rollout]:
    """Transfer samples between replicas, so that all replicas have equally many. Collective.

    Returns the rollouts of this replica: a contiguous range of `samples`.
    samples: samples of all replicas. Their number is a multiple of the number of replicas.
    owners: {sample id: index of the replica that has the rollout}, identical on all ranks.
    local: {sample id: rollout} of this replica.
    template: any rollout without data latents that has the sampling plan and latent shape of the samples.
    """
    count = len(samples) // world.dp_size
    received: list[Rollout] = []
    for i, sample in enumerate(samples):  # all ranks transfer in the same order, which prevents deadlocks
        source, target = owners[sample.sample_id], i // count
        if source == target == world.dp_rank:
            received.append(local[sample.sample_id])
        elif target == world.dp_rank:
            received.append(
                _fill_template(
                    template, sample, [world.transfer_tensor(t, source, target) for t in _list_tensors(template)]
                )
            )
        elif source == world.dp_rank:
            for tensor in _list_tensors(local[sample.sample_id]):
                world.transfer_tensor(tensor, source, target)
    return received


def _list_tensors(rollout: Rollout) -> list[Tensor]:
    """Return the generated tensors of a sample. Consecutive steps share latents, which are listed once."""
    tensors = [rollout.clean_latents]
    before: Transition | None = None
    for t in rollout.transitions:
        tensors += [] if _is_next_step(t, before) else [t.latents]
        tensors += [t.next_latents, t.log_prob, *([] if t.mean is None else [t.mean])]
        before = t
    return [*tensors, *(rollout.states[k] for k in sorted(rollout.states))]


def _fill_template(template: Rollout, sample: RolloutSample, tensors: Sequence[Tensor]) -> Rollout:
    """Return the rollout of `sample`, with the denoising steps of `template` and the given tensors.

    The tensors have the order of `_list_tensors`.
    """
    remaining = iter(tensors)
    clean = next(remaining)
    transitions: list[Transition] = []
    for t in template.transitions:
        before = transitions[-1] if transitions else None
        latents = before.next_latents if before is not None and _is_next_step(t, before) else next(remaining)
        next_latents, log_prob = next(remaining), next(remaining)
        mean = None if t.mean is None else next(remaining)
        transition = Transition(index=t.index, latents=latents, next_latents=next_latents, log_prob=log_prob, mean=mean)
        transitions.append(transition)
    return dataclasses.replace(
        template,
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt=sample.prompt,
        seed=sample.seed,
        noise_seed=sample.noise_seed,
        clean_latents=clean,
        transitions=transitions,
        states={k: next(remaining) for k in sorted(template.states)},
    )


def _is_next_step(transition: Transition, before: Transition | None) -> bool:
    return before is not None and transition.index == before.index + 1
