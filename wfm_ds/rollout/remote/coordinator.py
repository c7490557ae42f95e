"""State of an async run: chunks to generate, results to train on, and complete steps. The module does no I/O.

Publication n is the policy after RL step n. Publication 0 has the weights before the first step. A worker generates
each chunk of a group as one batch, with the weights of one publication:

    ADMITTED --fresh result--> CLOSED --pop_step(s)--> trained
       ^  `--stale result or lost task: retried under a new task id
       `--abandoned: CLOSED with a reason instead of samples

With staleness bound S, the chunks of step s become tasks when a publication n >= s - 1 - S exists. A result is accepted
only if its weights are a publication n >= s - 1 - S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class GroupChunk(NamedTuple):
    """Samples `first` to `stop` - 1 of group number `group` of RL step `step`."""

    step: int
    group: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class ClosedChunk:
    """A generated or abandoned chunk."""

    chunk: GroupChunk
    task_id: str
    publication: int | None = None  # that generated the chunk; None: the chunk was abandoned
    reason: str = ""  # why the chunk was abandoned


@dataclass(slots=True)
class _StepChunks:
    waiting: dict[GroupChunk, str] = field(default_factory=dict)  # {chunk: task id}
    closed: dict[GroupChunk, ClosedChunk] = field(default_factory=dict)


class Coordinator:
    """Tracks the chunks of one session: one process of the run, from start or resume to exit.

    Every task id contains the session id, so results of earlier sessions are ignored.
    """

    def __init__(
        self,
        *,
        session_id: str,
        groups_per_step: int,
        group_size: int,
        chunk_size: int,
        max_staleness: int,
        first_step: int,
        last_step: int,
    ) -> None:
        """Plan these RL steps. Call `record_publication(first_step - 1)` before any other method."""
        self.session_id, self.groups_per_step, self.group_size = session_id, groups_per_step, group_size
        self.chunk_size = min(chunk_size, group_size)
        self.max_staleness, self.last_step = max_staleness, last_step
        self.first_publication = first_step - 1
        self.last_publication = first_step - 2  # nothing is published yet
        self.next_step = first_step  # the first step without tasks
        self.num_dropped_stale = 0
        self._steps: dict[int, _StepChunks] = {}
        self._chunk_by_task: dict[str, GroupChunk] = {}  # chunks of open tasks, by task id
        self._retries: dict[GroupChunk, int] = {}

    def record_publication(self, publication: int) -> None:
        """Record that the policy after RL step `publication` is published. Raises ValueError unless it is the next."""
        if publication != self.last_publication + 1:
            raise ValueError(f"expected publication {self.last_publication + 1}, got {publication}")
        self.last_publication = publication

    def admit_chunks(self) -> list[tuple[GroupChunk, str]]:
        """Create the tasks of all RL steps that the staleness bound now allows. Returns [(chunk, task id)]."""
        admitted = []
        while self.next_step <= min(self.last_publication + 1 + self.max_staleness, self.last_step):
            step, self.next_step = self.next_step, self.next_step + 1
            self._steps[step] = _StepChunks()
            for chunk in self._split_step(step):
                admitted.append((chunk, self._create_task(chunk)))
        return admitted

    def record_result(self, task_id: str, publication: int) -> str | None:
        """Record the result of a task. publication: index of the publication that generated the samples.

        If the publication is too old, drops the samples and returns the id of a new task. Otherwise returns None.
        """
        chunk = self._chunk_by_task.get(task_id)
        if chunk is None:
            return None  # duplicate result
        oldest = max(chunk.step - 1 - self.max_staleness, self.first_publication)
        if not oldest <= publication <= self.last_publication:
            self.num_dropped_stale += chunk.stop - chunk.first
            del self._chunk_by_task[task_id]
            self._retries[chunk] = self._retries.get(chunk, 0) + 1
            return self._create_task(chunk)
        self._close_chunk(ClosedChunk(chunk, task_id, publication))
        return None

    def abandon_chunk(self, task_id: str, reason: str) -> None:
        """Close a chunk that no worker could generate."""
        chunk = self._chunk_by_task.get(task_id)
        if chunk is not None:
            self._close_chunk(ClosedChunk(chunk, task_id, reason=reason))

    def is_complete(self, step: int) -> bool:
        """Return whether all chunks of the step are generated or abandoned. False if the step has no tasks yet."""
        chunks = self._steps.get(step)
        return chunks is not None and not chunks.waiting

    def pop_step(self, step: int) -> list[ClosedChunk]:
        """Remove a step and return its chunks in the order of the samples. Raises ValueError if it is not complete."""
        if not self.is_complete(step):
            raise ValueError(f"step {step} is not complete")
        return [closed for _, closed in sorted(self._steps.pop(step).closed.items())]

    def num_waiting(self, step: int) -> int:
        chunks = self._steps.get(step)
        return len(chunks.waiting) if chunks is not None else 0

    def find_chunk(self, task_id: str) -> GroupChunk:
        """Return the chunk of an unfinished task. Raises KeyError for a finished or unknown task."""
        return self._chunk_by_task[task_id]

    def _split_step(self, step: int) -> Iterator[GroupChunk]:
        for group in range(self.groups_per_step):
            for first in range(0, self.group_size, self.chunk_size):
                yield GroupChunk(step, group, first, min(first + self.chunk_size, self.group_size))

    def _create_task(self, chunk: GroupChunk) -> str:
        retry = self._retries.get(chunk, 0)
        task_id = f"{self.session_id}/{chunk.step}/{chunk.group}/{chunk.first}{f'~{retry}' if retry else ''}"
        self._steps[chunk.step].waiting[chunk] = task_id
        self._chunk_by_task[task_id] = chunk
        return task_id

    def _close_chunk(self, closed: ClosedChunk) -> None:
        del self._chunk_by_task[closed.task_id]
        step = self._steps[closed.chunk.step]
        del step.waiting[closed.chunk]
        step.closed[closed.chunk] = closed
        self._retries.pop(closed.chunk, None)
