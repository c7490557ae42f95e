"""Media batches and loaded rewards."""

import numpy as np

from wfm_ds.types import MediaBatch
from wfm_reward import registry


def media_batch(media, prompts=None, metadata=None, *, prefix="s", **fields):
    """Return a batch of images [B,H,W,3] or videos [B,T,H,W,3]."""
    count = len(media)
    return MediaBatch(
        media=media,
        sample_ids=[f"{prefix}{i}" for i in range(count)],
        prompts=prompts or ["a cat"] * count,
        metadata=metadata or [{}] * count,
        **fields,
    )


def loaded(name, **options):
    reward = registry.create_reward(name, "cpu", options)
    reward.load()
    return reward


def checksum(array):
    """Return a number that depends on the shape, the position and the value of each pixel."""
    return float((array.astype(np.float64) * np.arange(1, array.size + 1).reshape(array.shape)).sum()) + array.ndim
