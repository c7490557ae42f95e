"""Rollouts by worker processes. Rank 0 schedules chunks, and replica leaders download their replica's samples."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.distributed.accelerator import ranks_per_node
from wfm_ds.errors import RunError, describe_error
from wfm_ds.models.conditioning_frames import pad_num_frames
from wfm_ds.rollout.groups import (
    Group,
    GroupSource,
    RolloutSample,
    StepRollouts,
    extract_rollout,
    first_replica,
    plan_samples,
)
from wfm_ds.rollout.histories import HistoryLayout, replace_conditioning_frames
from wfm_ds.rollout.remote.identity import compute_identity
from wfm_ds.rollout.remote.packing import empty_rollout, unpack_trajectory, validate_history, validate_trajectory
from wfm_ds.rollout.remote.publisher import PolicyPublisher, remove_publications
from wfm_ds.rollout.remote.scheduler import ChunkPlan, ChunkScheduler
from wfm_ds.rollout.remote.service import RolloutService, load_trainer_keys
from wfm_ds.rollout.rewards import unpack_scores
from wfm_ds.runs.job import Job
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.keys import ClientKeys
from wfm_ds.transport.sockets import PipeError
from wfm_ds.types import Rollout, Score

log = logging.getLogger(__name__)

ATTACH_S = 60.0
FETCH_S = 120.0  # maximum wait for the next of the requested payloads
ROUND_S = 2.0  # how long rank 0 waits for results before all ranks check whether to stop

_ChunkTensors = Mapping[str, Tensor]
"""{name: float32 tensor} of one chunk."""


class AsyncSource:
    """Rollout source that gets samples from worker processes."""

    def __init__(
        self,
        job: Job,
        groups: GroupSource,
        algorithm: RlAlgorithm,
        endpoint: str,
        keys: ClientKeys | None,
        service: RolloutService | None,
        layout: HistoryLayout | None = None,
    ) -> None:
        """All ranks must call this.

        service: the rollout service on rank 0, None on other ranks.
        layout: layout of histories and recordings, or None if the run has neither.
        """
        self.job, self.groups, self.algorithm = job, groups, algorithm
        self.settings, self.service, self.layout = job.recipe.rl.rollout, service, layout
        self.session_id = str(job.world.broadcast(uuid.uuid4().hex[:12]))
        run = job.recipe.run.output_dir.name[:100].replace("/", "_")
        self.client = PipeClient(endpoint, run=f"{run}-{self.session_id}", client=f"rank{job.world.rank}", keys=keys)
        self.publisher = PolicyPublisher(
            job, algorithm.rollout_policy, self.session_id, service.broker if service else None
        )
        self.scheduler = ChunkScheduler(job, self.session_id, self.client, service) if service is not None else None
        self._groups: dict[int, list[Group]] = {}  # {RL step: its groups}
        self._scores: dict[str, dict[str, Score]] = {}
        self._staleness: dict[str, float] = {}

    def publish_policy(self, step: int) -> None:
        """Publish the policy after RL step `step`. All ranks must call this.

        The workers then get the tasks of all RL steps that rollout.max_staleness allows. After the last RL step, they
        are told to exit instead.
        """
        if step >= self.job.recipe.run.steps:
            if self.service is not None:
                self.service.broker.dismiss_workers("the run is complete")
            return
        with self.job.timer("publish"):
            self.publisher.publish(step)
        admitted = self.scheduler.admit_steps(step) if self.scheduler is not None else None
        for admitted_step in self.job.world.broadcast(admitted):
            read = self.groups.step_groups(admitted_step)
            groups = gather_groups(self.job, read)
            self._groups[admitted_step] = [dataclasses.replace(group, recording=None) for group in read]
            if self.scheduler is not None:
                self.scheduler.submit_step(admitted_step, groups)

    def wait_until_ready(self, step: int) -> bool:
        """Wait until all samples of the step are generated and scored. All ranks must call this.

        Returns False if a rank gets a stop request first. Raises RunError on all ranks if no chunk finishes within
        rollout.timeout_s.
        """
        ready, error = False, ""
        with self.job.timer("rollout_wait"):
            while not ready:
                if self.scheduler is not None:
                    ready, error = self.scheduler.wait_for_step(step, ROUND_S)
                ready, error = self.job.world.broadcast([ready, error])
                if error:
                    raise RunError(error)
                if not ready and self.job.should_stop():
                    return False
        return True

    def collect_rollouts(self, step: int) -> StepRollouts:
        """Download this replica's samples of a ready step (`wait_until_ready`). All ranks must call this.

        Raises RunError on all ranks if a sample cannot be downloaded or is malformed.
        """
        job = self.job
        samples = plan_samples(job.recipe, self._groups.pop(step), step, self.settings.group_size)
        plans = job.world.broadcast(self.scheduler.plan_step(step) if self.scheduler else None)
        chunks = [ChunkPlan(**plan) for plan in plans]
        samples = self._slice_prompts(samples, chunks)
        count = job.run_sizes.samples_per_rank
        first = job.world.dp_rank * count
        local_chunks = [chunk for chunk in chunks if chunk.first < first + count and chunk.stop > first]
        tensors: Mapping[str, _ChunkTensors] = {}
        error = ""
        try:
            if job.world.is_leader:
                tensors = self._fetch_chunks(local_chunks, samples, step)
        except (PipeError, KeyError, IndexError, TypeError, ValueError) as raised:
            error = f"rank {job.world.rank} cannot get the samples of step {step}: {describe_error(raised)}"
        errors = [e for e in job.world.gather(error) if e]
        if errors:  # raised on all ranks, before the next collective
            raise RunError("; ".join(errors))
        if self.scheduler is not None:
            self.client.release_results([chunk.task_id for chunk in chunks])
        local: list[Rollout] = []
        for chunk in local_chunks:
            rows = range(max(chunk.first, first), min(chunk.stop, first + count))
            local += self._share_rollouts(chunk, tensors.get(chunk.task_id), samples, rows, step)
        self._scores = self._merge_scores(chunks, samples)
        self._staleness = self._staleness_metrics(chunks)
        return StepRollouts(samples=samples, local_rollouts=local, first_index=first, failures={})

    def collect_rewards(self, rollouts: StepRollouts) -> list[dict[str, Score]]:
        return [self._scores[s.sample_id] for s in rollouts.samples]

    def step_metrics(self) -> dict[str, float]:
        return self.groups.data_metrics() | self._staleness

    def _slice_prompts(self, samples: list[RolloutSample], chunks: Sequence[ChunkPlan]) -> list[RolloutSample]:
        if self.layout is None:
            return samples
        groups = [self.layout.slice_group(samples[chunk.first].group, chunk.clip) for chunk in chunks]
        return [
            dataclasses.replace(sample, group=group)
            for chunk, group in zip(chunks, groups, strict=True)
            for sample in samples[chunk.first : chunk.stop]
        ]

    def _fetch_chunks(
        self, chunks: Sequence[ChunkPlan], samples: Sequence[RolloutSample], step: int
    ) -> Mapping[str, _ChunkTensors]:
        """Return {task id: tensors}, without abandoned chunks. Raises ValueError if a chunk does not match the plan."""
        plan, shape = self.algorithm.plan(step), self.job.sampler.latent_shape
        by_task = {chunk.task_id: chunk for chunk in chunks if chunk.staleness is not None}
        tensors = {
            task_id: {s.name: torch.from_numpy(a) for s, a in zip(result.specs, result.read_tensors(), strict=True)}
            for task_id, result in self.client.fetch_results(by_task, FETCH_S).items()
        }
        for task_id, chunk in by_task.items():
            try:
                trajectory = unpack_trajectory(chunk.layout, tensors[task_id])
                validate_trajectory(trajectory, chunk.stop - chunk.first, plan, shape)
                if chunk.clip:
                    validate_history(tensors[task_id], samples[chunk.first].group)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(f"{task_id} is malformed: {describe_error(error)}") from error
        return tensors

    def _share_rollouts(
        self, chunk: ChunkPlan, tensors: _ChunkTensors | None, samples: Sequence[RolloutSample], rows: range, step: int
    ) -> list[Rollout]:
        """Broadcast a chunk from the replica leader and return the rollouts of `samples[i]` for each i in `rows`.

        All ranks of the replica must call this. tensors: the chunk's tensors on the leader, None on other ranks.
        """
        world, plan = self.job.world, self.algorithm.plan(step)
        if chunk.staleness is None:
            return [empty_rollout(samples[i], plan, self.job.sampler.latent_shape, world.device) for i in rows]
        names = world.broadcast_in_replica(None if tensors is None else list(tensors))
        shared = {
            name: world.broadcast_tensor_in_replica(None if tensors is None else tensors[name].to(world.device))
            for name in names
        }
        trajectory = unpack_trajectory(chunk.layout, shared)
        chosen = [samples[i] for i in rows]
        if chunk.clip:
            group = replace_conditioning_frames(samples[chunk.first].group, shared["history"])
            chosen = [dataclasses.replace(sample, group=group) for sample in chosen]
        return [
            extract_rollout(sample, trajectory, i - chunk.first, replace_nonfinite=False)
            for i, sample in zip(rows, chosen, strict=True)
        ]

    def _merge_scores(
        self, chunks: Sequence[ChunkPlan], samples: Sequence[RolloutSample]
    ) -> dict[str, dict[str, Score]]:
        names = [function.name for function in self.job.recipe.rl.reward.functions]
        scores: dict[str, dict[str, Score]] = {}
        for chunk in chunks:
            scores |= unpack_scores(chunk.scores)
            if chunk.staleness is None:
                for s in samples[chunk.first : chunk.stop]:
                    failed = {n: Score(sample_id=s.sample_id, reward=n, failure=chunk.reason) for n in names}
                    scores[s.sample_id] = failed
        return scores

    def _staleness_metrics(self, chunks: Sequence[ChunkPlan]) -> dict[str, float]:
        ages = [c.staleness for c in chunks for _ in range(c.stop - c.first) if c.staleness is not None]
        counts: list[float] = []
        if self.scheduler is not None:
            counts = [float(self.scheduler.coordinator.num_dropped_stale), len(self.scheduler.broker.worker_ids())]
        dropped, lanes = self.job.world.broadcast(counts)
        return {
            "rollout/staleness_mean": sum(ages) / max(1, len(ages)),
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/dropped_stale": dropped,
            "rollout/workers": lanes / self.settings.in_flight,
        }


def start_async_source(
    job: Job,
    groups: GroupSource,
    algorithm: RlAlgorithm,
    rewards: str,
    resources: ExitStack,
    layout: HistoryLayout | None = None,
) -> AsyncSource:
    """Start the broker and the workers on rank 0 and connect all ranks to the broker. All ranks must call this.

    resources: ExitStack that stops broker and workers. Raises UserError on all ranks if one of them cannot be started.
    """
    world, settings = job.world, job.recipe.rl.rollout

    def start() -> RolloutService:
        identity = compute_identity(job.recipe, job.model)
        return RolloutService(job.recipe, identity, rewards, ranks_per_node(world.size))

    service: RolloutService | None = world.run_checked(start, on="main")
    if service is not None:
        resources.callback(remove_publications, job.recipe)  # runs after service.stop: callbacks run in reverse order
        resources.callback(service.stop)
    endpoint = world.broadcast(service.endpoint if service is not None else None)
    keys = world.run_checked(lambda: load_trainer_keys(settings))
    source = AsyncSource(job, groups, algorithm, endpoint, keys and keys.local_client_keys, service, layout)
    resources.callback(source.client.close)
    world.run_checked(lambda: source.client.attach(ATTACH_S))
    return source


def gather_groups(job: Job, groups: Sequence[Group]) -> list[Group]:
    """Return copies of all groups of a step. All ranks must call this.

    Each replica has the arrays of the groups that it has read: `data`, the media of the prompt and, on the leader,
    `recording`. On rank 0, all copies have these arrays. `data` is on the CPU and has only the conditioning frames.
    """
    latents = next((group.data for group in groups if group.data is not None), None)
    if job.model.clean_frame_range(job.recipe.algorithm.conditioning_frame_range)[1] == 0:
        latents = None
    recording = next((group.recording for group in groups if group.recording is not None), None)
    names = job.recipe.data.media_inputs
    # All media of an input have the same size, because async rollouts have a single size.
    media = next(group.prompt.inputs for group in groups if names[0] in group.prompt.inputs) if names else {}
    complete: list[Group] = []
    for g, group in enumerate(groups):  # all ranks transfer in the same order, which prevents deadlocks
        data, frames, inputs = None, group.recording, dict(group.prompt.inputs)
        if latents is not None:
            local = (latents if group.data is None else group.data)[:, : group.num_conditioning_frames]
            data = pad_num_frames(send_to_main(job, g, local).cpu(), latents.shape[1])
        if recording is not None:  # else no rewards need recordings, or this rank is not a replica leader
            if frames is None:
                frames = np.empty((1 + bool(group.history_seeds), *recording.shape[1:]), np.uint8)
            frames = send_to_main(job, g, torch.from_numpy(frames)).numpy()
        for name in names:
            array = inputs.get(name, np.empty_like(media[name]))
            inputs[name] = send_to_main(job, g, torch.from_numpy(array)).numpy()
        prompt = dataclasses.replace(group.prompt, inputs=inputs)
        complete.append(dataclasses.replace(group, data=data, recording=frames, prompt=prompt))
    return complete


def send_to_main(job: Job, group: int, tensor: Tensor) -> Tensor:
    """Send a tensor to rank 0 from the first replica with samples of group number `group` of the step.

    Rank 0 returns the received tensor, other ranks return `tensor`. All ranks must call this with tensors of the same
    shape.
    """
    owner = first_replica(job, group)
    if tensor.numel() and owner and job.world.dp_rank in (0, owner):
        return job.world.transfer_tensor(tensor, owner, 0)
    return tensor
