"""Media batches and loaded rewards."""

from wfm_ds.types import MediaBatch
from wfm_reward import registry


def media_batch(media, prompts=None, metadata=None, *, fps=None, reward="", prefix="s", inputs=()):
    """Return a batch of images [B,H,W,3] or videos [B,T,H,W,3]."""
    count = len(media)
    return MediaBatch(
        media=media,
        sample_ids=[f"{prefix}{i}" for i in range(count)],
        prompts=prompts or ["a cat"] * count,
        metadata=metadata or [{}] * count,
        fps=fps,
        reward=reward,
        inputs=inputs,
    )


def loaded(name, **options):
    reward = registry.create_reward(name, "cpu", options)
    reward.load()
    return reward
