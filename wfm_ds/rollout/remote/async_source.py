"""Rollouts by worker processes. Rank 0 schedules chunks, and replica leaders download their replica's samples."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wfm_ds.algorithms import RlAlgorithm
from wfm_ds.distributed.world import ranks_per_node
from wfm_ds.errors import RunError
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.groups import Group, GroupSource, RolloutSample, StepRollouts, extract_rollout, plan_step_samples
from wfm_ds.rollout.remote.coordinator import ClosedChunk, Coordinator, GroupChunk
from wfm_ds.rollout.remote.frame_gathering import gather_conditioning_frames
from wfm_ds.rollout.remote.identity import compute_identity
from wfm_ds.rollout.remote.packing import ChunkTask, empty_rollout, unpack_trajectory, validate_trajectory
from wfm_ds.rollout.remote.publisher import PolicyPublisher, remove_publications
from wfm_ds.rollout.remote.service import RolloutService, load_trainer_keys
from wfm_ds.rollout.scores import unpack_scores
from wfm_ds.runs.job import Job
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.keys import ClientKeys
from wfm_ds.transport.messages import MAX_ROWS
from wfm_ds.transport.pending_submissions import TaskRequest
from wfm_ds.transport.sockets import PipeError
from wfm_ds.transport.wire import Message, WireError
from wfm_ds.types import Rollout, Score

log = logging.getLogger(__name__)

MAX_CHUNK = 32  # samples: their scores fit into the header of one message
ATTACH_S = 60.0
FETCH_S = 120.0  # timeout if none of the requested payloads arrives
ROUND_S = 2.0  # how long rank 0 waits before all ranks check whether to stop
LOOK_S = 0.2  # poll interval
TASK_S = 7 * 86400.0  # lifetime of a task in the broker; rollout.timeout_s ends the run much earlier


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Metadata of a finished chunk of an RL step, which rank 0 broadcasts to all ranks."""

    first: int  # index of its first sample among the samples of the step
    stop: int
    task_id: str
    staleness: int | None  # age of its weights in RL steps; None: the chunk has no samples
    reason: str  # why it has no samples
    layout: Mapping[str, Any]  # layout of the trajectory, from pack_trajectory
    scores: Sequence[Any]  # from pack_scores

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ChunkPlan:
        return cls(**content)


_ChunkTensors = Mapping[str, Tensor]
"""{name: float32 tensor} of one chunk."""


def _payload_tensors(payload: Message) -> _ChunkTensors:
    """Return {name: CPU tensor} for the arrays of a message."""
    tensors = zip(payload.specs, payload.read_tensors(), strict=True)
    return {spec.name: torch.from_numpy(array) for spec, array in tensors}


class AsyncSource:
    """Rollout source that gets samples from worker processes. coordinator.py explains the staleness bound."""

    def __init__(
        self,
        job: Job,
        groups: GroupSource,
        algorithm: RlAlgorithm,
        endpoint: str,
        keys: ClientKeys | None,
        service: RolloutService | None,
    ) -> None:
        """Create the source. Collective.

        service: the rollout service on rank 0, None on other ranks.
        """
        self.job, self.groups, self.algorithm = job, groups, algorithm
        self.settings, self.service = job.recipe.rl.rollout, service
        self.session_id = str(job.world.broadcast(uuid.uuid4().hex[:12]))
        run = job.recipe.run.output_dir.name[:100].replace("/", "_")
        self.client = PipeClient(endpoint, run=f"{run}-{self.session_id}", client=f"rank{job.world.rank}", keys=keys)
        self.publisher = PolicyPublisher(
            job, algorithm.rollout_policy, self.session_id, service.broker if service else None
        )
        self.scheduler = _Scheduler(job, self.session_id, self.client, service) if service is not None else None
        self._groups: dict[int, list[Group]] = {}  # of admitted steps
        self._scores: dict[str, dict[str, Score]] = {}
        self._staleness: dict[str, float] = {}

    def attach(self) -> None:
        """Connect to the broker. Raises PipeError if the broker does not answer."""
        self.client.attach(ATTACH_S)

    def publish_policy(self, step: int) -> None:
        """Publish the policy and submit the RL steps that workers may generate with it. Collective.

        After the last step, this method dismisses the workers instead.
        """
        if step >= self.job.recipe.run.steps:
            if self.service is not None:
                self.service.broker.dismiss_workers("the run is complete")
            return
        with self.job.timer("publish"):
            self.publisher.publish(step)
        admitted = self.scheduler.admit_steps(step) if self.scheduler is not None else None
        for admitted_step in self.job.world.broadcast(admitted):
            self._groups[admitted_step] = self.groups.step_groups(admitted_step)
            groups = gather_conditioning_frames(self.job, self._groups[admitted_step])
            if self.scheduler is not None:
                self.scheduler.submit_step(admitted_step, groups)

    def wait_until_ready(self, step: int) -> bool:
        """Wait until all samples of the step are generated and scored. Collective.

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
        """Download this replica's samples of a step. Call it after `wait_until_ready` returned True. Collective.

        Raises RunError on all ranks if a sample cannot be downloaded or is malformed.
        """
        job = self.job
        samples = plan_step_samples(
            self._groups.pop(step),
            group_size=self.settings.group_size,
            step=step,
            run_seed=job.recipe.run.seed,
            same_noise=job.recipe.sampling.same_noise,
        )
        plans = job.world.broadcast(self.scheduler.plan_step(step) if self.scheduler else None)
        chunks = [ChunkPlan.from_json(plan) for plan in plans]
        count = job.run_sizes.samples_per_rank
        first = job.world.dp_rank * count
        local_chunks = [chunk for chunk in chunks if chunk.first < first + count and chunk.stop > first]
        tensors: Mapping[str, _ChunkTensors] = {}
        error = ""
        try:
            if job.world.is_leader:
                tensors = self._fetch_chunks(local_chunks, step)
        except (PipeError, KeyError, IndexError, TypeError, ValueError) as raised:
            error = f"rank {job.world.rank} cannot get the samples of step {step}: {type(raised).__name__} {raised}"
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

    def close(self) -> None:
        self.client.close()

    def _fetch_chunks(self, chunks: Sequence[ChunkPlan], step: int) -> dict[str, _ChunkTensors]:
        """Download the tensors of these chunks and return {task id: tensors}.

        Abandoned chunks are skipped, because they have no samples. Raises ValueError if a chunk does not match the
        step's sampling plan.
        """
        plan, shape = self.algorithm.plan(step), self.job.sampler.latent_shape
        by_task = {chunk.task_id: chunk for chunk in chunks if chunk.staleness is not None}
        tensors = {
            task_id: _payload_tensors(message)
            for task_id, message in self.client.fetch_results(by_task, FETCH_S).items()
        }
        for task_id, chunk in by_task.items():
            try:
                trajectory = unpack_trajectory(chunk.layout, tensors[task_id])
                validate_trajectory(trajectory, chunk.stop - chunk.first, plan, shape)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(f"{task_id} is malformed: {type(error).__name__} {error}") from error
        return tensors

    def _share_rollouts(
        self, chunk: ChunkPlan, tensors: _ChunkTensors | None, samples: Sequence[RolloutSample], rows: range, step: int
    ) -> list[Rollout]:
        """Broadcast a chunk from the replica leader and return its rollouts in `rows`. Collective in the replica.

        tensors: the chunk's tensors on the leader, None on other ranks.
        samples: all samples of the step.
        rows: indices into `samples` of the rollouts to return.
        Only the leader downloads tensors, because the network between ranks is faster than the broker.
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
        return [extract_rollout(samples[i], trajectory, i - chunk.first, replace_nonfinite=False) for i in rows]

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
        counts = (
            [float(self.scheduler.coordinator.num_dropped_stale), float(len(self.scheduler.broker.worker_ids()))]
            if self.scheduler
            else []
        )
        dropped, lanes = self.job.world.broadcast(counts)
        return {
            "rollout/staleness_mean": sum(ages) / max(1, len(ages)),
            "rollout/staleness_max": float(max(ages, default=0)),
            "rollout/dropped_stale": dropped,
            "rollout/workers": lanes / self.settings.in_flight,
        }


class _Scheduler:
    """Scheduler of an AsyncSource on rank 0. It admits RL steps, submits their chunks and records the results."""

    def __init__(self, job: Job, session_id: str, client: PipeClient, service: RolloutService) -> None:
        self.job, self.client, self.service = job, client, service
        self.broker: Broker = service.broker
        self.session_id = session_id
        self._coordinator: Coordinator | None = None
        self._samples: dict[int, list[RolloutSample]] = {}  # of admitted steps, with their conditioning frames
        self._unsubmitted_chunks: dict[int, list[tuple[GroupChunk, str]]] = defaultdict(
            list
        )  # admitted but not submitted, by step
        self._results: dict[str, Mapping[str, Any]] = {}  # metadata by task id
        self._finished_at_s = self.client.now_s()

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator is not None, "admit_steps was not called"
        return self._coordinator

    def admit_steps(self, step: int) -> list[int]:
        """Record that the policy after `step` is published, and admit the RL steps that may use it.

        Returns the admitted steps that `submit_step` has not sent yet.
        """
        recipe = self.job.recipe
        if self._coordinator is None:  # at the start of the session
            self._coordinator = Coordinator(
                session_id=self.session_id,
                groups_per_step=recipe.rl.rollout.prompts_per_step,
                group_size=recipe.rl.rollout.group_size,
                chunk_size=min(recipe.engine.max_forward_batch, MAX_CHUNK),
                max_staleness=recipe.rl.rollout.max_staleness,
                first_step=step + 1,
                last_step=recipe.run.steps,
            )
        self.coordinator.record_publication(step)
        self._finished_at_s = self.client.now_s()
        for chunk, task_id in self.coordinator.admit_chunks():
            self._unsubmitted_chunks[chunk.step].append((chunk, task_id))
        return sorted(self._unsubmitted_chunks)

    def submit_step(self, step: int, groups: Sequence[Group]) -> None:
        """Send an admitted step to the workers.

        groups: all groups of the step, with their conditioning frames.
        """
        recipe = self.job.recipe
        self._samples[step] = plan_step_samples(
            groups,
            group_size=recipe.rl.rollout.group_size,
            step=step,
            run_seed=recipe.run.seed,
            same_noise=recipe.sampling.same_noise,
        )
        chunks = self._unsubmitted_chunks.pop(step)
        for start in range(0, len(chunks), MAX_ROWS):
            self._submit_tasks(chunks[start : start + MAX_ROWS])

    def wait_for_step(self, step: int, timeout_s: float) -> tuple[bool, str]:
        """Record results until the step is complete or the timeout expires.

        Returns (whether the step is complete, reason why the run cannot continue or "").
        """
        until_s = self.client.now_s() + timeout_s
        while True:
            for outcome in self.client.take_outcomes(0.0 if self.coordinator.is_complete(step) else LOOK_S):
                self._finished_at_s = self.client.now_s()
                self._record_outcome(outcome)
            if self.coordinator.is_complete(step):
                return True, ""
            now_s = self.client.now_s()
            if reason := self._failure_reason(step, now_s):
                return False, reason
            if now_s > until_s:
                return False, ""

    def plan_step(self, step: int) -> list[dict[str, Any]]:
        """Return the ChunkPlans of a complete step as JSON, in the order of the samples."""
        del self._samples[step]
        return [self._plan_chunk(closed).to_json() for closed in self.coordinator.pop_step(step)]

    def _plan_chunk(self, closed: ClosedChunk) -> ChunkPlan:
        chunk, base = closed.chunk, closed.chunk.group * self.job.recipe.rl.rollout.group_size
        meta = self._results.pop(closed.task_id, {"layout": {}, "scores": []})
        return ChunkPlan(
            first=base + chunk.first,
            stop=base + chunk.stop,
            task_id=closed.task_id,
            staleness=None if closed.publication is None else chunk.step - 1 - closed.publication,
            reason=closed.reason,
            layout=meta["layout"],
            scores=meta["scores"],
        )

    def _failure_reason(self, step: int, now_s: float) -> str:
        limit_s, workers = self.job.recipe.rl.rollout.timeout_s, self.broker.worker_ids()
        if reason := self.service.failure_reason():
            return reason
        if not self.broker.is_alive():
            return f"the rollout broker failed: {self.broker.error}"
        if now_s - self._finished_at_s > limit_s:
            connected = f"connected workers: {', '.join(workers)}" if workers else "no worker is connected"
            return (
                f"no chunk finished for {limit_s:g} s (rollout.timeout_s): step {step} waits for "
                f"{self.coordinator.num_waiting(step)} chunks, {connected}"
            )
        return ""

    def _record_outcome(self, outcome: TaskOutcome) -> None:
        if not outcome.ok:
            self.coordinator.abandon_chunk(outcome.id, outcome.reason)
            return
        meta, chunk = outcome.meta, self.coordinator.find_chunk(outcome.id)
        try:
            publication = int(meta["publication"])
            if meta["life"] != self.session_id:
                publication = -1
            expected = {s.sample_id for s in self._chunk_samples(chunk)}
            if unpack_scores(meta["scores"]).keys() != expected or not isinstance(meta["layout"], dict):
                raise ValueError("wrong samples")
        except (KeyError, TypeError, ValueError) as error:
            self.client.release_results([outcome.id])
            self.coordinator.abandon_chunk(outcome.id, f"malformed result of a worker: {error}")
            return
        retry_id = self.coordinator.record_result(outcome.id, publication)
        if retry_id is None:
            self._results[outcome.id] = meta
            return
        log.info("%s was generated with publication %d, which is too old: retrying", outcome.id, publication)
        self.client.release_results([outcome.id])
        self._submit_tasks([(chunk, retry_id)])

    def _submit_tasks(self, tasks: Sequence[tuple[GroupChunk, str]]) -> None:
        """Send tasks to the broker, in messages below the size limit.

        If a single chunk exceeds the limit, it is abandoned and no error is raised, because the other ranks would hang.
        """
        contents = [ChunkTask(chunk.step, self._chunk_samples(chunk)) for chunk, _ in tasks]
        task_rows, arrays = (
            [task.to_rows() for task in contents],
            [array for task in contents for array in task.to_arrays()],
        )
        rows = list(itertools.chain(*task_rows))
        until_s, requests, start = self.client.now_s() + TASK_S, list[TaskRequest](), 0
        for (_, task_id), rows_of_task in zip(tasks, task_rows, strict=True):
            requests.append(TaskRequest(task_id, TASK_KIND, start, start + len(rows_of_task), until_s))
            start += len(rows_of_task)
        try:
            self.client.submit(rows, arrays, requests)
        except WireError as error:
            if len(tasks) == 1:
                log.error("%s cannot be sent: %s", tasks[0][1], error)
                self.coordinator.abandon_chunk(tasks[0][1], f"cannot be sent: {error}")
                return
            half = len(tasks) // 2  # too large: long prompts or large frames
            self._submit_tasks(tasks[:half])
            self._submit_tasks(tasks[half:])

    def _chunk_samples(self, chunk: GroupChunk) -> list[RolloutSample]:
        base = chunk.group * self.job.recipe.rl.rollout.group_size
        return self._samples[chunk.step][base + chunk.first : base + chunk.stop]


def start_async_source(
    job: Job, groups: GroupSource, algorithm: RlAlgorithm, rewards: str, resources: ExitStack
) -> AsyncSource:
    """Start the broker and the workers on rank 0 and connect all ranks to the broker. Collective.

    resources: ExitStack that stops broker and workers. Raises UserError on all ranks if broker or workers cannot be
    started.
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
    source = AsyncSource(job, groups, algorithm, endpoint, keys and keys.local_client_keys, service)
    resources.callback(source.close)
    world.run_checked(source.attach)
    return source
