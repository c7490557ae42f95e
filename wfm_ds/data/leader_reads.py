"""Reading by replica leaders. The leader is the first rank of a replica.

It reads the files and sends the metadata of the samples to the other ranks of its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wfm_ds.data.batch_reader import TrainingSample
from wfm_ds.data.samples import Sample, pack_prompt, unpack_prompt
from wfm_ds.distributed.world import World


def read_on_leader(world: World, read: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
    """Call `read` on each replica leader and return its samples on all ranks of the replica. Collective.

    Only the leader's samples have media, pixels or latents. If `read` raises UserError on a leader, all ranks raise it.
    """
    samples: list[TrainingSample] | None = world.run_checked(read, on="leaders")
    packed = world.broadcast_in_replica(None if samples is None else [pack_sample(sample) for sample in samples])
    return [unpack_sample(sample) for sample in packed] if samples is None else samples


def choose_on_leader(world: World, samples: Sequence[Sample], choose: Callable[[], list[Sample]]) -> list[Sample]:
    """Call `choose` on each replica leader and return its choice on all ranks of the replica. Collective.

    samples: all samples, identical on every rank. If `choose` raises UserError on a leader, all ranks raise it.
    """
    chosen: list[Sample] | None = world.run_checked(choose, on="leaders")
    if chosen is not None:
        indices = {sample.id: index for index, sample in enumerate(samples)}  # ids are unique in a dataset
        world.broadcast_in_replica([[indices[sample.id], pack_prompt(sample.prompt)] for sample in chosen])
        return chosen
    return [replace(samples[index], prompt=unpack_prompt(packed)) for index, packed in world.broadcast_in_replica(None)]


def pack_sample(sample: TrainingSample) -> list[Any]:
    """Return a sample as JSON. Media, pixels and latents are omitted."""
    return [sample.sample_id, sample.epoch, sample.position, pack_prompt(sample.prompt)]


def unpack_sample(packed: Sequence[Any]) -> TrainingSample:
    sample_id, epoch, position, prompt = packed
    return TrainingSample(
        sample_id=sample_id,
        epoch=epoch,
        position=position,
        prompt=unpack_prompt(prompt),
        media=None,
        framing=None,
        pixels=None,
    )
