"""Sends the samples of colocated rollouts for scoring while later samples are denoised."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.rollout.rewards import (
    LATENTS,
    NOT_FINITE,
    References,
    ReplicaDecoding,
    RewardClient,
    Scores,
    submit_finite_samples,
)
from wfm_ds.types import Prompt, Score

if TYPE_CHECKING:
    from wfm_ds.runs.job import Job


class ScoringQueue:
    """Decodes denoised chunks and sends them to the reward service, while the next chunk is denoised.

    All ranks of the replica must call every method.
    """

    def __init__(self, job: Job, rewards: RewardClient) -> None:
        self.job, self.rewards = job, rewards
        self._fps = job.recipe.sampling.fps if job.model.is_video else None
        self._waiting: list[DenoisedChunk] = []  # not decoded yet; together fewer samples than ranks
        self._decoding: deque[tuple[ReplicaDecoding, DenoisedChunk]] = deque()  # at most two
        self._failures: Scores = {}

    def submit(
        self, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt], references: References = ()
    ) -> None:
        """Start to decode a chunk. It is sent for scoring now or in a later call of `submit` or `flush`."""
        self._waiting.append(DenoisedChunk(latents, sample_ids, prompts, references))
        if sum(len(chunk.latents) for chunk in self._waiting) >= self.job.world.sp_size:
            self._start_decoding()
            self._send_decoded(num_kept=int(self._decoding[-1][0].is_pending))

    def flush(self) -> Scores:
        """Send the remaining chunks for scoring.

        Returns failed Scores for samples with non-finite latents that were submitted since the last call.
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
        while len(self._decoding) > num_kept:
            decoding, chunk = self._decoding.popleft()
            images, is_finite = decoding.wait()
            sampler = self.job.sampler
            self._failures |= submit_finite_samples(
                self.rewards,
                images,
                is_finite,
                chunk.sample_ids,
                chunk.prompts,
                self._fps,
                chunk.references,
                sampler.decode_sound(chunk.latents) if self.rewards.sound_rewards else None,
                sampler.model.sound_rate,
            )


class FiniteCheck:
    """Replaces ScoringQueue in runs without rewards: only finds samples with non-finite latents."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Tensor, Sequence[str]]] = []  # (whether each sample is finite, sample ids)

    def submit(
        self, latents: Tensor, sample_ids: Sequence[str], prompts: Sequence[Prompt], references: References = ()
    ) -> None:
        self._chunks.append((latents.flatten(1).isfinite().all(1), sample_ids))  # read later, to not wait for the GPU

    def flush(self) -> Scores:
        chunks, self._chunks = self._chunks, []
        failed = [i for is_finite, ids in chunks for i, ok in zip(ids, is_finite.tolist(), strict=True) if not ok]
        return {i: {LATENTS: Score(sample_id=i, reward=LATENTS, failure=NOT_FINITE)} for i in failed}


@dataclass(frozen=True, slots=True)
class DenoisedChunk:
    latents: Tensor  # [B, ...]
    sample_ids: Sequence[str]
    prompts: Sequence[Prompt]
    references: References

    @classmethod
    def concatenate(cls, chunks: Sequence[DenoisedChunk]) -> DenoisedChunk:
        latents = chunks[0].latents if len(chunks) == 1 else torch.cat([chunk.latents for chunk in chunks])
        ids = [sample_id for chunk in chunks for sample_id in chunk.sample_ids]
        references = [reference for chunk in chunks for reference in chunk.references]
        return cls(latents, ids, [prompt for chunk in chunks for prompt in chunk.prompts], references)
