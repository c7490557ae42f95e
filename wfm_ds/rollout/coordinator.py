"""Bookkeeping of an async run: groups to generate, samples to train on, steps that are complete. Pure.

A *publication* n is the policy after RL step n (0: before the first). RL step s trains on the groups of its own place
in the prompt stream, all of them and in order, so that what is trained follows from the step alone and a resumed run
skips nothing. A group comes in *chunks*, each generated as one batch under the weights of one publication:

    ADMITTED --result, fresh--> CLOSED --plan(s)--> trained
       ^  `-----result, stale: again under a new id
       `--lost: again under a new id;    given up: CLOSED with a reason in place of samples

The bound on staleness holds twice. Admission: the groups of step s are admitted when n >= s - 1 - S, and a worker never
uses older weights than those announced with its task. Acceptance: a result of publication n is taken if
s - 1 - n <= S, whatever its worker claims to have done meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of a group: samples [first, stop) of group `group` of RL step `step`."""

    step: int
    group: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Closed:
    """End of a chunk: `publication` of the policy that made it, or `reason` why there are no samples."""

    chunk: Chunk
    task_id: str
    publication: int | None = None
    reason: str = ""


@dataclass(slots=True)
class _Step:
    waiting: dict[Chunk, str] = field(default_factory=dict)  # task id by chunk
    closed: dict[Chunk, Closed] = field(default_factory=dict)


class Coordinator:
    """One life of a run: `life` is in every task id, so that results of an earlier life are not taken."""

    def __init__(
        self,
        *,
        life: str,
        groups_per_step: int,
        group_size: int,
        chunk_size: int,
        max_staleness: int,
        first_step: int,
        last_step: int,
    ) -> None:
        """Steps first_step to last_step will be trained, after publication first_step - 1."""
        self.life, self.groups_per_step, self.group_size = life, groups_per_step, group_size
        self.chunk_size = min(chunk_size, group_size)
        self.max_staleness, self.last_step = max_staleness, last_step
        self.first_publication = first_step - 1
        self.published = first_step - 2  # nothing yet
        self.next_step = first_step  # the first that is not admitted
        self.dropped_stale = 0
        self._steps: dict[int, _Step] = {}
        self._chunk_of: dict[str, Chunk] = {}  # of live tasks
        self._retries: dict[Chunk, int] = {}

    def publish(self, publication: int) -> None:
        """The policy after this RL step can be used. Raises ValueError unless it is the next one."""
        if publication != self.published + 1:
            raise ValueError(f"publication {publication} cannot follow {self.published}")
        self.published = publication

    def admit(self) -> list[tuple[Chunk, str]]:
        """Chunks that may be generated from here on, and the ids of their tasks."""
        admitted = []
        while self.next_step <= min(self.published + 1 + self.max_staleness, self.last_step):
            step, self.next_step = self.next_step, self.next_step + 1
            self._steps[step] = _Step()
            for chunk in self._chunks(step):
                admitted.append((chunk, self._new_task(chunk)))
        return admitted

    def result(self, task_id: str, publication: int) -> str | None:
        """Samples have arrived. If they are too old: the id of the task that is to make them again, else None."""
        chunk = self._chunk_of.get(task_id)
        if chunk is None:
            return None  # a repetition
        oldest = max(chunk.step - 1 - self.max_staleness, self.first_publication)
        if not oldest <= publication <= self.published:
            self.dropped_stale += chunk.stop - chunk.first
            return self._again(chunk, task_id)
        self._close(Closed(chunk, task_id, publication))
        return None

    def give_up(self, task_id: str, reason: str) -> None:
        """Close a chunk that no worker could make: its samples have no reward."""
        chunk = self._chunk_of.get(task_id)
        if chunk is not None:
            self._close(Closed(chunk, task_id, reason=reason))

    def ready(self, step: int) -> bool:
        """True when all chunks of an admitted step are closed."""
        found = self._steps.get(step)
        return found is not None and not found.waiting

    def plan(self, step: int) -> list[Closed]:
        """All chunks of a step that is ready, in the order of its samples; they are trained on once. ValueError if it
        is not ready, or was planned before."""
        if not self.ready(step):
            raise ValueError(f"step {step} is not ready")
        return [closed for _, closed in sorted(self._steps.pop(step).closed.items())]

    def waiting(self, step: int) -> int:
        """Chunks that the step still lacks."""
        found = self._steps.get(step)
        return len(found.waiting) if found is not None else 0

    def chunk_of(self, task_id: str) -> Chunk:
        """The chunk of a live task. Raises KeyError."""
        return self._chunk_of[task_id]

    def _chunks(self, step: int) -> Iterator[Chunk]:
        for group in range(self.groups_per_step):
            for first in range(0, self.group_size, self.chunk_size):
                yield Chunk(step, group, first, min(first + self.chunk_size, self.group_size))

    def _new_task(self, chunk: Chunk) -> str:
        retry = self._retries.get(chunk, 0)
        task_id = f"{self.life}/{chunk.step}/{chunk.group}/{chunk.first}{f'~{retry}' if retry else ''}"
        self._steps[chunk.step].waiting[chunk] = task_id
        self._chunk_of[task_id] = chunk
        return task_id

    def _again(self, chunk: Chunk, task_id: str) -> str:
        del self._chunk_of[task_id]
        self._retries[chunk] = self._retries.get(chunk, 0) + 1
        return self._new_task(chunk)

    def _close(self, closed: Closed) -> None:
        del self._chunk_of[closed.task_id]
        step = self._steps[closed.chunk.step]
        del step.waiting[closed.chunk]
        step.closed[closed.chunk] = closed
        self._retries.pop(closed.chunk, None)
