"""Media to the rewards, and the scores of all ranks on every rank, so that all compute the same advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from wfm_ds.distributed.world import World
from wfm_ds.models.sampler import finite_samples
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.types import MediaBatch, Prompt, Score

if TYPE_CHECKING:
    from wfm_ds.run.job import Job

Scores = dict[str, dict[str, Score]]
"""Scores by sample id and reward."""


def submit_pictures(
    job: Job, rewards: RewardClient, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt]
) -> tuple[npt.NDArray[np.uint8], Scores]:
    """Decode latents [B, ...] to uint8 images [B,H,W,3] or videos [B,T,H,W,3] and send them to be scored; returns at
    once. The leader of a replica alone does: its other ranks get no media.

    A sample whose latents are not finite is not sent; its named failures are returned.
    """
    media, finite = decoded(job, latents)
    names = [function.name for function in job.recipe.rl.reward.functions]
    fps = job.recipe.sampling.fps if job.model.video else None
    return media, submit_media(rewards, names, media, finite, sample_ids, prompts, fps)


def decoded(job: Job, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
    """Decode on the leader of a replica (Sampler.media); its other ranks get no media, [0]. All know what is finite."""
    if not job.world.is_leader:
        return np.empty(0, np.uint8), finite_samples(latents)
    return job.sampler.media(latents)


def submit_media(
    rewards: RewardClient,
    names: Sequence[str],
    media: npt.NDArray[np.uint8],
    finite: Sequence[bool],
    sample_ids: Sequence[str],
    prompts: Sequence[Prompt],
    fps: float | None,
) -> Scores:
    """Send the media that were made of finite latents to be scored by the rewards of these names; the named failures of
    the others."""
    whole = [i for i, ok in enumerate(finite) if ok]
    if whole and len(media):
        rewards.submit(
            MediaBatch(
                media=media[whole],
                sample_ids=[sample_ids[i] for i in whole],
                prompts=[prompts[i].text for i in whole],
                metadata=[prompts[i].metadata for i in whole],
                fps=fps,
            )
        )
    broken = [sample_id for sample_id, ok in zip(sample_ids, finite, strict=True) if not ok]
    why = "latents are not finite"
    return {s: {name: Score(sample_id=s, reward=name, failure=why) for name in names} for s in broken}


def gather_scores(world: World, mine: Mapping[str, Mapping[str, Score]]) -> Scores:
    """{sample_id: {reward: Score}} of all replicas, in their order; collective. `mine`: what the leader knows."""
    parts = world.replica_gather(pack_scores(mine))
    return {sample_id: scores for part in parts for sample_id, scores in unpack_scores(part).items()}


def pack_scores(scores: Mapping[str, Mapping[str, Score]], max_failure_chars: int | None = None) -> list[Any]:
    """JSON form of scores by sample and reward; failures may be cut to this many characters."""
    return [
        [
            sample_id,
            [
                [s.reward, s.value, s.failure and s.failure[:max_failure_chars], s.seconds, dict(s.parts)]
                for s in by_reward.values()
            ],
        ]
        for sample_id, by_reward in scores.items()
    ]


def unpack_scores(packed: Sequence[Any]) -> Scores:
    return {
        sample_id: {
            reward: Score(
                sample_id=sample_id, reward=reward, value=value, failure=failure, seconds=seconds, parts=parts
            )
            for reward, value, failure, seconds, parts in by_reward
        }
        for sample_id, by_reward in packed
    }
