"""Rollouts on the training ranks, which send samples for scoring while later samples are denoised."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.chunks import even_ranges, split_into_chunks
from wfm_ds.engine.fp8_linear import use_fast_accumulation
from wfm_ds.rollout.groups import (
    GroupSource,
    RolloutSample,
    RolloutSource,
    StepRollouts,
    extract_rollout,
    plan_samples,
    stack_conditioning_frames,
)
from wfm_ds.rollout.histories import HistoryLayout, ReplicaHistories
from wfm_ds.rollout.rewards import (
    LATENTS,
    NOT_FINITE,
    References,
    ReplicaDecoding,
    RewardClient,
    Scores,
    gather_scores,
    submit_finite_samples,
)
from wfm_ds.runs.job import Job
from wfm_ds.sampling.denoise import SamplingPlan, Trajectory
from wfm_ds.types import Prompt, Score


class ColocatedSource(RolloutSource):
    """Rollout source that generates the samples on the training ranks and sends them to the reward service."""

    def __init__(
        self,
        job: Job,
        groups: GroupSource,
        rewards: RewardClient | None,
        algorithm: RlAlgorithm,
        layout: HistoryLayout | None = None,
    ) -> None:
        """rewards: client of the reward service, or None if samples are neither decoded nor scored.

        layout: layout of histories and recordings, or None if the run has neither.
        """
        self.job, self.groups, self.rewards, self.algorithm = job, groups, rewards, algorithm
        self.settings = job.recipe.rl.rollout
        self.accumulates_fast = (  # without float8 layers, no need to search for them in each rollout
            job.recipe.model.base_precision == "fp8" and not job.recipe.rl.algorithm.compares_log_probs
        )
        self.histories = None if layout is None else ReplicaHistories(job, layout)
        self.scoring = FiniteCheck() if rewards is None else ScoringQueue(job, rewards)

    def publish_policy(self, step: int) -> None:
        """Do nothing, because the ranks that generate samples already have the weights."""

    def step_metrics(self) -> dict[str, float]:
        return self.groups.data_metrics()

    def collect_rollouts(self, step: int) -> StepRollouts:
        groups, plan = self.groups.step_groups(step), self.algorithm.plan(step)
        if self.histories is not None:
            with self.rollout_policy():
                groups = self.histories.start_samples(groups, plan)
        return self.generate_samples(plan_samples(self.job.recipe, groups, step, self.settings.group_size), plan)

    @contextlib.contextmanager
    def rollout_policy(self) -> Iterator[None]:
        """Use the rollout policy without gradients in the `with` block."""
        engine = self.job.engine
        with (
            engine.use_policy(self.algorithm.rollout_policy, merge=self.settings.merge_lora),
            engine.replay_graphs(),
            use_fast_accumulation(engine.module) if self.accumulates_fast else contextlib.nullcontext(),
            torch.no_grad(),
        ):
            yield

    def generate_samples(self, samples: Sequence[RolloutSample], plan: SamplingPlan) -> StepRollouts:
        """Denoise this replica's shard of the samples and send it for scoring. All ranks must call this."""
        job = self.job
        shards = even_ranges(len(samples), job.world.dp_size)
        shard = shards[job.world.dp_rank]
        local = samples[shard.start : shard.stop]
        # All replicas must run the same number of forward passes.
        padded = [*local, *[samples[0]] * (len(shards[0]) - len(local))]
        trajectories: list[tuple[Sequence[RolloutSample], Trajectory]] = []
        with self.rollout_policy():
            for chunk in split_into_chunks(padded, job.recipe.engine.max_forward_batch):
                trajectory = job.sampler.generate(
                    "rollout",
                    [sample.prompt for sample in chunk],
                    [sample.noise_seed for sample in chunk],
                    plan,
                    seeds=[sample.seed for sample in chunk],
                    conditional_frames=stack_conditioning_frames([sample.group for sample in chunk]),
                    shape=None if chunk[0].group.data is None else chunk[0].group.data.shape,  # equal within an RL step
                    keep_passes=self.algorithm.keeps_passes,
                )
                unpadded = chunk[: max(0, len(local) - sum(len(earlier) for earlier, _ in trajectories))]
                trajectories.append((chunk, trajectory))
                if unpadded:
                    with job.timer("decode"):
                        clean = trajectory.clean_latents[: len(unpadded)]
                        ids, prompts = [s.sample_id for s in unpadded], [s.prompt for s in unpadded]
                        self.scoring.submit(clean, ids, prompts, [s.group.reference for s in unpadded])
        with job.timer("decode"):
            failures = self.scoring.flush()
        rollouts = [
            extract_rollout(sample, trajectory, row, replace_nonfinite=sample.sample_id in failures)
            for chunk, trajectory in trajectories
            for row, sample in enumerate(chunk)
        ]
        return StepRollouts(
            samples=samples, local_rollouts=rollouts[: len(local)], first_index=shard.start, failures=failures
        )

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        if self.rewards is None:
            failures = gather_scores(self.job.world, rollouts.failures)
            return [failures.get(m.sample_id, {}) for m in rollouts.samples]
        by_id = gather_scores(self.job.world, self.rewards.wait() | rollouts.failures)
        return [by_id[m.sample_id] for m in rollouts.samples]


class ScoringQueue:
    """Decodes and sends chunks for scoring while the next one is denoised. All ranks of a replica call every method."""

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
        """Send the remaining chunks. Returns failed Scores for non-finite samples submitted since the last call."""
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
