"""Media to the rewards, and the scores of all ranks on every rank, so that all compute the same advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wfm_ds.distributed.world import World
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.types import FIRST_FRAME, MediaBatch, Prompt, Score

if TYPE_CHECKING:
    from wfm_ds.run.job import Job

NUM_REASONS = 5  # of failed rewards, named in a log line
Scores = dict[str, dict[str, Score]]
"""Scores by sample id and reward."""


def submit_pictures(
    job: Job, rewards: RewardClient, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt]
) -> tuple[npt.NDArray[np.uint8], Scores]:
    """Decode latents [B, ...] to uint8 images [B,H,W,3] or videos [B,T,H,W,3] and send them to be scored; returns at
    once. All ranks of a replica call it; its leader alone sends and gets media.

    A sample whose latents are not finite is not sent; its named failures are returned.
    """
    media, finite = decoded(job, latents)
    return media, submit_decoded(job, rewards, media, finite, sample_ids, prompts)


def decoded(job: Job, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
    """Decode on all ranks of a replica, which call it together: media on its leader, [0] on the others. All know what
    is finite."""
    return SharedDecoding(job, latents).wait()


class SharedDecoding:
    """Samples that the ranks of a replica decode together: each a share of them, neighbours in their order."""

    def __init__(self, job: Job, latents: Tensor) -> None:
        """Begin with this rank's share (Sampler.decoding). latents: equal on these ranks."""
        self._world, ranks = job.world, job.world.sp_size
        self._counts = [len(latents) // ranks + (rank < len(latents) % ranks) for rank in range(ranks)]
        first = sum(self._counts[: job.world.sp_rank])
        self._mine = job.sampler.decoding(latents, slice(first, first + self._counts[job.world.sp_rank]))
        self.is_behind = self._mine.is_behind

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Return what `decoded` does; collective in a replica."""
        media, finite = self._mine.wait()
        return self._world.joined_rows(media, self._counts), finite


class Submissions:
    """Chunks of samples on their way to the rewards. A chunk is decoded behind its denoising, on a GPU beside that of
    the next one, and sent when it is there. In a replica chunks wait until every rank has a sample to decode.

    All ranks of a replica call the same methods in one order.
    """

    def __init__(self, job: Job, rewards: RewardClient) -> None:
        self.job, self.rewards = job, rewards
        self._pending: list[Chunk] = []
        self._decoding: tuple[SharedDecoding, Chunk] | None = None
        self._broken: Scores = {}

    def add(self, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt]) -> None:
        self._pending.append(Chunk(latents, sample_ids, prompts))
        if sum(len(chunk.latents) for chunk in self._pending) >= self.job.world.sp_size:
            self._begin()

    def close(self) -> Scores:
        """Send what is left; return the named failures of all samples whose latents were not finite."""
        if self._pending:
            self._begin()
        self._send()
        return self._broken

    def _begin(self) -> None:
        chunk, self._pending = Chunk.joined(self._pending), []
        decoding = SharedDecoding(self.job, chunk.latents)
        self._send()  # the one before, which was decoded meanwhile
        self._decoding = decoding, chunk
        if not decoding.is_behind:
            self._send()

    def _send(self) -> None:
        if self._decoding is None:
            return
        (decoding, chunk), self._decoding = self._decoding, None
        media, finite = decoding.wait()
        self._broken |= submit_decoded(self.job, self.rewards, media, finite, chunk.sample_ids, chunk.prompts)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples that were denoised."""

    latents: Tensor  # [B, ...]
    sample_ids: Sequence[str]
    prompts: Sequence[Prompt]

    @classmethod
    def joined(cls, chunks: Sequence[Chunk]) -> Chunk:
        latents = chunks[0].latents if len(chunks) == 1 else torch.cat([chunk.latents for chunk in chunks])
        ids = [sample_id for chunk in chunks for sample_id in chunk.sample_ids]
        return cls(latents, ids, [prompt for chunk in chunks for prompt in chunk.prompts])


def submit_decoded(
    job: Job,
    rewards: RewardClient,
    media: npt.NDArray[np.uint8],
    finite: Sequence[bool],
    sample_ids: Sequence[str],
    prompts: Sequence[Prompt],
) -> Scores:
    """`submit_media` to the rewards of a run."""
    names = [function.name for function in job.recipe.rl.reward.functions]
    fps = job.recipe.sampling.fps if job.model.video else None
    return submit_media(rewards, names, media, finite, sample_ids, prompts, fps)


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
                inputs=[small(prompts[i].inputs) for i in whole],
                fps=fps,
            )
        )
    broken = [sample_id for sample_id, ok in zip(sample_ids, finite, strict=True) if not ok]
    why = "latents are not finite"
    return {s: {name: Score(sample_id=s, reward=name, failure=why) for name in names} for s in broken}


def small(inputs: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """These inputs without the pixels that a video begins with: it shows them, and they are no part of a message's
    header."""
    return {name: array for name, array in inputs.items() if name != FIRST_FRAME}


def gather_scores(world: World, mine: Mapping[str, Mapping[str, Score]]) -> Scores:
    """{sample_id: {reward: Score}} of all replicas, in their order; collective. `mine`: what the leader knows."""
    parts = world.replica_gather(pack_scores(mine))
    return {sample_id: scores for part in parts for sample_id, scores in unpack_scores(part).items()}


def failure_reasons(scores: Sequence[Mapping[str, Score]]) -> str:
    """Name the first few different failures among these samples' rewards, for a log line; empty where none failed."""
    failed = {
        f"{score.reward}: {score.failure}" for by_reward in scores for score in by_reward.values() if score.failure
    }
    return "; ".join(sorted(failed)[:NUM_REASONS])


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
