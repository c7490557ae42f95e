"""Submits the chunks of RL steps to workers and records the results. Runs on rank 0."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.recipe.rollout import MAX_CHUNK
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.groups import Group, RolloutSample, plan_samples
from wfm_ds.rollout.remote.coordinator import ClosedChunk, Coordinator, GroupChunk
from wfm_ds.rollout.remote.packing import ChunkTask
from wfm_ds.rollout.remote.service import RolloutService
from wfm_ds.rollout.rewards import unpack_scores
from wfm_ds.runs.job import Job
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.messages import MAX_ROWS
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.transport.wire import WireError

log = logging.getLogger(__name__)

LOOK_S = 0.2  # poll interval
TASK_S = 7 * 86400.0  # lifetime of a task in the broker; rollout.timeout_s ends the run much earlier


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Metadata of a finished chunk of an RL step."""

    first: int  # index of its first sample among the samples of the step
    stop: int
    task_id: str
    staleness: int | None  # age of its weights in RL steps; None if the chunk has no samples
    reason: str  # why the chunk has no samples; "" if it has samples
    clip: int  # index of the samples' clip
    layout: Mapping[str, Any]  # layout of the trajectory, from pack_trajectory
    scores: Sequence[Any]  # from pack_scores


class ChunkScheduler:
    """Submits the chunks of RL steps to workers and records the results."""

    def __init__(self, job: Job, session_id: str, client: PipeClient, service: RolloutService) -> None:
        self.job, self.client, self.service = job, client, service
        self.broker: Broker = service.broker
        self.session_id = session_id
        self._coordinator: Coordinator | None = None
        self._samples: dict[int, list[RolloutSample]] = {}  # {RL step: samples}
        # {step: chunks and their task ids} of the steps that `submit_step` has yet to submit
        self._unsubmitted_chunks: dict[int, list[tuple[GroupChunk, str]]] = defaultdict(list)
        self._results: dict[str, Mapping[str, Any]] = {}  # {task id: metadata}
        self._finished_at_s = self.client.now_s()

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator is not None, "admit_steps was not called"
        return self._coordinator

    def admit_steps(self, step: int) -> list[int]:
        """Record that the policy after `step` is published. Returns the RL steps to pass to `submit_step` now."""
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
        """Submit a step that `admit_steps` returned. groups: all groups of the step, with their conditioning frames."""
        self._samples[step] = plan_samples(self.job.recipe, groups, step, self.job.recipe.rl.rollout.group_size)
        chunks = self._unsubmitted_chunks.pop(step)
        for start in range(0, len(chunks), MAX_ROWS):
            self._submit_tasks(chunks[start : start + MAX_ROWS])

    def wait_for_step(self, step: int, timeout_s: float) -> tuple[bool, str]:
        """Record results until the step is complete or the time is up. Returns (is_complete, reason to end the run)."""
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
        """Remove a complete step and return its ChunkPlans as JSON values, in the order of the samples."""
        plans = [dataclasses.asdict(self._plan_chunk(closed)) for closed in self.coordinator.pop_step(step)]
        del self._samples[step]
        return plans

    def _plan_chunk(self, closed: ClosedChunk) -> ChunkPlan:
        chunk, base = closed.chunk, closed.chunk.group * self.job.recipe.rl.rollout.group_size
        num_clips = len(self._samples[chunk.step][base].group.history_seeds)
        meta = self._results.pop(closed.task_id, {"layout": {}, "scores": [], "clip": num_clips})
        return ChunkPlan(
            first=base + chunk.first,
            stop=base + chunk.stop,
            task_id=closed.task_id,
            staleness=None if closed.publication is None else chunk.step - 1 - closed.publication,
            reason=closed.reason,
            clip=meta["clip"],
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
            samples = self._chunk_samples(chunk)
            expected = {s.sample_id for s in samples}
            if unpack_scores(meta["scores"]).keys() != expected or not isinstance(meta["layout"], dict):
                raise ValueError("wrong samples")
            if meta["clip"] not in (0, len(samples[0].group.history_seeds)):
                raise ValueError("wrong clip")
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
        contents = [ChunkTask(chunk.step, self._chunk_samples(chunk)) for chunk, _ in tasks]
        task_rows = [task.to_rows() for task in contents]
        arrays = [array for task in contents for array in task.to_arrays()]
        rows = list(itertools.chain(*task_rows))
        until_s, requests, start = self.client.now_s() + TASK_S, list[TaskRequest](), 0
        for (_, task_id), rows_of_task in zip(tasks, task_rows, strict=True):
            requests.append(TaskRequest(task_id, TASK_KIND, start, start + len(rows_of_task), until_s))
            start += len(rows_of_task)
        try:
            self.client.submit(rows, arrays, requests)
        except WireError as error:
            if len(tasks) == 1:  # an exception would leave the other ranks waiting
                log.error("%s cannot be sent: %s", tasks[0][1], error)
                self.coordinator.abandon_chunk(tasks[0][1], f"cannot be sent: {error}")
                return
            half = len(tasks) // 2  # too large: long prompts or large frames
            self._submit_tasks(tasks[:half])
            self._submit_tasks(tasks[half:])

    def _chunk_samples(self, chunk: GroupChunk) -> list[RolloutSample]:
        base = chunk.group * self.job.recipe.rl.rollout.group_size
        return self._samples[chunk.step][base + chunk.first : base + chunk.stop]
