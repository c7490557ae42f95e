"""Broadcast of a scanned dataset from rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from wfm_ds.data.datasets import TrainingData
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.hf_dataset import HfMedia
from wfm_ds.data.samples import LocalFile, Sample
from wfm_ds.data.webdataset import TarMember
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World

MEDIA_CLASSES = (LocalFile, HfMedia, EpisodeVideo, TarMember)  # objects of these classes can be sent to other ranks


def read_on_main(world: World, read: Callable[[], TrainingData]) -> TrainingData:
    """Call `read` on rank 0 and return its result on every rank. All ranks must call this.

    If a sample has a user-defined media class, every rank calls `read`. If `read` raises UserError on rank 0, all ranks
    raise it.
    """
    data: TrainingData | None = world.run_without_timeout(read)
    if world.size == 1 and data is not None:
        return data
    LIVENESS.start_operation("a broadcast of rank 0's data")
    sent = [data if data is not None and can_be_sent([*data.samples, *data.held_out]) else None]
    dist.broadcast_object_list(sent, src=0, group=world.host_group)  # pickles, but only from rank 0 of this run
    if sent[0] is None:  # identical on every rank
        own: TrainingData = world.run_checked(lambda: read() if data is None else data)
        return own
    return sent[0] if data is None else data


def can_be_sent(samples: list[Sample]) -> bool:
    """Return whether all media are of MEDIA_CLASSES, and all rows are EpisodeRows."""
    return all(
        isinstance(sample.rows, EpisodeRows | None)
        and all(
            type(media) in MEDIA_CLASSES
            for media in (*sample.all_media, *sample.files.values(), *sample.images.values())
        )
        for sample in samples
    )
