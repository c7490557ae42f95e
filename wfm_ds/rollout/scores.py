"""Decodes samples, submits them for scoring, and gathers the scores on every rank."""

from __future__ import annotations

from collections import deque
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
    from wfm_ds.runs.job import Job

NUM_REASONS = 5  # failure reasons in one log line
Scores = dict[str, dict[str, Score]]
"""{sample id: {reward name: Score}}."""


def decode_in_replica(job: Job, latents: Tensor) -> tuple[npt.NDArray[np.uint8], list[bool]]:
    """Decode latents [B, ...] on all ranks of a replica. Collective in the replica.

    Returns (uint8 images, whether the latents of each sample are finite). Only the replica leader gets the images. On
    other ranks the images are an empty array [0].
    """
    return ReplicaDecoding(job, latents).wait()


class ReplicaDecoding:
    """Decodes samples on all ranks of a replica. Each rank decodes a contiguous shard."""

    def __init__(self, job: Job, latents: Tensor) -> None:
        """Start to decode this rank's shard of `latents`. All ranks of the replica must pass identical latents."""
        self._world, ranks = job.world, job.world.sp_size
        self._counts = [len(latents) // ranks + (rank < len(latents) % ranks) for rank in range(ranks)]
        first = sum(self._counts[: job.world.sp_rank])
        self._local_decoding = job.sampler.start_decoding(
            latents, slice(first, first + self._counts[job.world.sp_rank])
        )
        self.is_pending = self._local_decoding.is_pending

    def wait(self) -> tuple[npt.NDArray[np.uint8], list[bool]]:
        """Wait for all shards and return the result of `decode_in_replica`. Collective in the replica."""
        images, is_finite = self._local_decoding.wait()
        return self._world.gather_replica_rows(images, self._counts), is_finite


class ScoringQueue:
    """Decodes denoised chunks and sends them to the reward service. All methods are collective in the replica.

    On a GPU, a side stream decodes a chunk while the next chunk is denoised. Chunks are merged until every rank of the
    replica has a sample to decode.
    """

    def __init__(self, job: Job, rewards: RewardClient) -> None:
        self.job, self.rewards = job, rewards
        self._reward_names = [function.name for function in job.recipe.rl.reward.functions]
        self._fps = job.recipe.sampling.fps if job.model.is_video else None
        self._waiting: list[DenoisedChunk] = []  # fewer samples than ranks
        self._decoding: deque[tuple[ReplicaDecoding, DenoisedChunk]] = deque()  # at most two
        self._failures: Scores = {}

    def submit(self, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt]) -> None:
        """Start to decode a chunk, and send the previously submitted one. On a CPU, both chunks are sent."""
        self._waiting.append(DenoisedChunk(latents, sample_ids, prompts))
        if sum(len(chunk.latents) for chunk in self._waiting) >= self.job.world.sp_size:
            self._start_decoding()
            self._send_decoded(num_kept=int(self._decoding[-1][0].is_pending))

    def flush(self) -> Scores:
        """Send the remaining chunks and return failed Scores.

        The result covers all samples with non-finite latents that were submitted since the last call.
        """
        if self._waiting:
            self._start_decoding()
        self._send_decoded(num_kept=0)
        failures, self._failures = self._failures, {}
        return failures

    def _start_decoding(self) -> None:
        chunk, self._waiting = DenoisedChunk.concatenate(self._waiting), []
        self._decoding.append((ReplicaDecoding(self.job, chunk.latents), chunk))

    def _send_decoded(self, num_kept: int) -> None:
        """Send the decoded chunks in order, but keep the last `num_kept` in the queue."""
        while len(self._decoding) > num_kept:
            decoding, chunk = self._decoding.popleft()
            images, is_finite = decoding.wait()
            self._failures |= submit_finite_samples(
                self.rewards, self._reward_names, images, is_finite, chunk.sample_ids, chunk.prompts, self._fps
            )


@dataclass(frozen=True, slots=True)
class DenoisedChunk:
    latents: Tensor  # [B, ...]
    sample_ids: Sequence[str]
    prompts: Sequence[Prompt]

    @classmethod
    def concatenate(cls, chunks: Sequence[DenoisedChunk]) -> DenoisedChunk:
        latents = chunks[0].latents if len(chunks) == 1 else torch.cat([chunk.latents for chunk in chunks])
        ids = [sample_id for chunk in chunks for sample_id in chunk.sample_ids]
        return cls(latents, ids, [prompt for chunk in chunks for prompt in chunk.prompts])


def submit_finite_samples(
    rewards: RewardClient,
    names: Sequence[str],
    images: npt.NDArray[np.uint8],
    is_finite: Sequence[bool],
    sample_ids: Sequence[str],
    prompts: Sequence[Prompt],
    fps: float | None,
) -> Scores:
    """Submit the samples with finite latents for scoring. Returns failed Scores for the other samples.

    names: names of the rewards, used in the failed Scores. fps: frame rate of videos, None for images.
    """
    rows = [i for i, ok in enumerate(is_finite) if ok]
    if rows and len(images):
        rewards.submit(
            MediaBatch(
                media=images[rows],
                sample_ids=[sample_ids[i] for i in rows],
                prompts=[prompts[i].text for i in rows],
                metadata=[prompts[i].metadata for i in rows],
                inputs=[drop_first_frame(prompts[i].inputs) for i in rows],
                fps=fps,
            )
        )
    failed = [sample_id for sample_id, ok in zip(sample_ids, is_finite, strict=True) if not ok]
    reason = "latents are not finite"
    return {s: {name: Score(sample_id=s, reward=name, failure=reason) for name in names} for s in failed}


def drop_first_frame(inputs: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the inputs without the first-frame image.

    The video already contains this image, and the message would become too large with it.
    """
    return {name: array for name, array in inputs.items() if name != FIRST_FRAME}


def gather_scores(world: World, local_scores: Mapping[str, Mapping[str, Score]]) -> Scores:
    """Return the scores of all replicas, in replica order. Collective.

    Each replica's scores come from `local_scores` of its leader. Other ranks' values are ignored.
    """
    parts = world.gather_from_leaders(pack_scores(local_scores))
    return {sample_id: scores for part in parts for sample_id, scores in unpack_scores(part).items()}


def summarize_failures(scores: Sequence[Mapping[str, Score]]) -> str:
    """Return the first NUM_REASONS different failure reasons as a log line, or "" if no score failed."""
    failed = {
        f"{score.reward}: {score.failure}" for by_reward in scores for score in by_reward.values() if score.failure
    }
    return "; ".join(sorted(failed)[:NUM_REASONS])


def pack_scores(scores: Mapping[str, Mapping[str, Score]], max_failure_chars: int | None = None) -> list[Any]:
    """Return the scores as JSON. Failure reasons are truncated to max_failure_chars characters."""
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
