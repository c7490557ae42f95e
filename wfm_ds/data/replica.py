"""Data for a whole replica: its leader reads files, and the other ranks learn from it what they must know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wfm_ds.data.reading import TrainingSample
from wfm_ds.data.samples import Sample, pack_prompt, unpack_prompt
from wfm_ds.distributed.world import World


def read_once(world: World, read: Callable[[], list[TrainingSample]]) -> list[TrainingSample]:
    """Return the samples that `read` gives on the leader, on every rank of its replica; collective. Only the leader's
    have media, pixels or latents. A UserError that a leader raises is raised on all ranks."""
    samples: list[TrainingSample] | None = world.checked(read, on="leaders")
    packed = world.share(None if samples is None else [pack_sample(sample) for sample in samples])
    return [unpack_sample(sample) for sample in packed] if samples is None else samples


def chosen_once(world: World, samples: Sequence[Sample], choose: Callable[[], list[Sample]]) -> list[Sample]:
    """Return the samples that `choose` gives on the leader, on every rank of its replica; collective, as `read_once`
    is."""
    chosen: list[Sample] | None = world.checked(choose, on="leaders")
    if chosen is not None:
        places = {sample.id: place for place, sample in enumerate(samples)}  # ids are unique in a data set
        world.share([[places[sample.id], pack_prompt(sample.prompt)] for sample in chosen])
        return chosen
    return [replace(samples[place], prompt=unpack_prompt(packed)) for place, packed in world.share(None)]


def pack_sample(sample: TrainingSample) -> list[Any]:
    """Return the JSON form of a sample, without its media."""
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
