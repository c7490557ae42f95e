"""`python -m wfm_reward.worker`: one scorer process. Started by serve.py (program.py says how)."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from wfm_ds.chunks import chunks
from wfm_ds.pipes.arrays import unpack_arrays
from wfm_ds.pipes.wire import Array
from wfm_ds.pipes.worker import Progress, TaskFailed, TaskInHand
from wfm_ds.types import MediaBatch, Score
from wfm_reward import registry
from wfm_reward.base import Reward
from wfm_reward.frames import score_frames
from wfm_reward.program import WorkerLoop, run

log = logging.getLogger(__name__)

REASON_CHARS = 200  # of one item's failure
ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "prompt": str,
    "metadata": dict,
    "fps": (int, float, type(None)),
}


def load(settings: Mapping[str, Any]) -> WorkerLoop:
    """Raises RewardError if the reward is unknown or cannot be loaded."""
    reward = registry.create(settings["reward"], settings["device"], settings["options"])
    reward.load()
    scoring = Scoring(reward, settings["reward"], settings["max_batch"])
    if not settings["max_wait_ms"]:
        # A task is a batch by itself: its scores do not depend on what else arrives.
        return WorkerLoop(scoring.tasks, settings["stall_s"])
    return WorkerLoop(scoring.tasks, settings["stall_s"], settings["max_batch"], settings["max_wait_ms"] / 1000)


@dataclass(frozen=True, slots=True)
class Scoring:
    """A reward behind its checks: whatever it does, each item gets one Score, a finite number or a named failure."""

    reward: Reward
    name: str  # as the recipe calls it
    max_batch: int

    def tasks(self, tasks: Sequence[TaskInHand], progress: Progress) -> list[Mapping[str, Any] | TaskFailed]:
        """Return {"scores": [[value, failure, parts], ...] of its rows, "batch": items scored together} for each task.

        A row is {id, prompt, metadata, fps?, inputs?}, its tensor uint8 [H,W,3] or [T,H,W,3]. Rows of one shape and
        speed that follow each other are scored together, at most max_batch of them, whichever task they are of. A task
        that does not look like this fails by itself.
        """
        checked = [_checked_rows(task) for task in tasks]
        items = [
            (number, row, tensor)
            for number, rows in enumerate(checked)
            if not isinstance(rows, TaskFailed)
            for row, tensor in rows
        ]
        answers: list[dict[str, Any]] = [{"scores": [], "batch": 0} for _ in tasks]
        done = 0
        for part in _alike(items, self.max_batch):
            numbers, rows, tensors = zip(*part, strict=True)
            scored = (score for some in self.items(rows, tensors) for score in some)
            for number, score in zip(numbers, scored, strict=True):
                answers[number]["scores"].append([score.value, _short(score.failure), dict(score.parts)])
                answers[number]["batch"] = len(part)
                done += 1
                progress(done, len(items))
        return [c if isinstance(c, TaskFailed) else a for c, a in zip(checked, answers, strict=True)]

    def items(self, rows: Sequence[Mapping[str, Any]], tensors: Sequence[Array]) -> Iterator[list[Score]]:
        """The scores in order, in one piece if the batch can be scored as a whole, else item by item."""
        try:
            scores = self.batch(rows, tensors)
        except Exception as error:  # the border of foreign code: it becomes named failures
            if len(rows) > 1:
                log.info("%s failed on %d items at once (%s): one by one", self.name, len(rows), error)
            else:
                log.warning("%s failed on %s", self.name, rows[0].get("id"), exc_info=True)
                yield [self._failed(str(rows[0].get("id", "")), f"{type(error).__name__}: {error}")]
                return
        else:
            yield scores
            return
        for row, tensor in zip(rows, tensors, strict=True):
            yield from self.items([row], [tensor])

    def batch(self, rows: Sequence[Mapping[str, Any]], tensors: Sequence[Array]) -> list[Score]:
        """Checked scores. Raises whatever the reward raises, and ValueError if what it returns is not one per item."""
        batch = MediaBatch(
            media=np.stack(tensors),
            sample_ids=[row["id"] for row in rows],
            prompts=[row["prompt"] for row in rows],
            metadata=[row["metadata"] for row in rows],
            fps=rows[0]["fps"],
            reward=self.name,
            inputs=[row.get("inputs", {}) for row in rows],
        )
        video = batch.media.ndim == 5
        if not video and "image" not in self.reward.media:
            return [item.failed("it scores videos, this is an image") for item in batch]
        needs, inputs = self.reward.needs, self.reward.needs_inputs
        lacking = {key for item in batch for key in needs if key not in item.metadata}
        lacking |= {key for item in batch for key in inputs if key not in item.inputs}
        if lacking:
            raise ValueError(f"the metadata and inputs lack {', '.join(sorted(lacking))}")
        if video and "video" not in self.reward.media:
            return score_frames(self.scored, batch, self.reward.frames, self.max_batch)
        return self.scored(batch)

    def scored(self, batch: MediaBatch) -> list[Score]:
        """Checked scores of media that the reward takes. Raises as `batch` does."""
        started = time.monotonic()
        answers = self.reward.score(batch)
        if not isinstance(answers, list) or len(answers) != len(batch):
            size = len(answers) if isinstance(answers, list) else f"a {type(answers).__name__}, not a list of"
            raise ValueError(f"score() returned {size} scores for {len(batch)} items")
        seconds = (time.monotonic() - started) / len(batch)
        return [self._checked(item.sample_id, answer, seconds) for item, answer in zip(batch, answers, strict=True)]

    def _checked(self, sample_id: str, answer: Any, seconds: float) -> Score:
        """The answer under our names, if it is a Score of this item with numbers in their ranges; else a failure."""
        if not isinstance(answer, Score):
            return self._failed(sample_id, f"score() returned a {type(answer).__name__} instead of a Score", seconds)
        if answer.sample_id != sample_id:
            return self._failed(sample_id, f"score() returned the score of {answer.sample_id!r} in its place", seconds)
        if answer.value is None:
            return self._failed(sample_id, answer.failure or "no reason given", seconds)
        for output, value in {**answer.parts, self.reward.primary: answer.value}.items():
            limits = self.reward.outputs.get(output)
            if not math.isfinite(value):
                return self._failed(sample_id, f"{output} = {value} is not finite", seconds)
            if limits is not None and value not in limits:
                why = f"{output} = {value:g} is outside {limits.low:g} to {limits.high:g}"
                return self._failed(sample_id, why, seconds)
        parts = {output: float(value) for output, value in answer.parts.items()}
        return Score(sample_id=sample_id, reward=self.name, value=float(answer.value), seconds=seconds, parts=parts)

    def _failed(self, sample_id: str, why: str, seconds: float = 0.0) -> Score:
        return Score(sample_id=sample_id, reward=self.name, failure=why, seconds=seconds)


def _checked_rows(task: TaskInHand) -> list[tuple[Mapping[str, Any], Array]] | TaskFailed:
    """The rows of a task with their media, or what is wrong with them: any client of the hub may have written them."""
    try:
        tensors = task.tensors()
    except TaskFailed as error:
        return error
    if len(tensors) != len(task.rows) or any(t.dtype != np.uint8 or t.ndim not in (3, 4) for t in tensors):
        return TaskFailed("each item needs uint8 media of shape [H,W,3] or [T,H,W,3]", fatal=True)
    for number, row in enumerate(task.rows):
        lacking = [key for key, kind in ROW_TYPES.items() if not isinstance(row.get(key), kind)]
        if lacking:
            return TaskFailed(f"row {number} does not have {' and '.join(lacking)} of the right type", fatal=True)
    try:
        inputs = [unpack_arrays(row.get("inputs", {})) for row in task.rows]
    except ValueError as error:
        return TaskFailed(f"its inputs cannot be read: {error}", fatal=True)
    return [
        ({"fps": None, **row, "inputs": told}, tensor)
        for row, told, tensor in zip(task.rows, inputs, tensors, strict=True)
    ]


Item: TypeAlias = tuple[int, Mapping[str, Any], Array]
"""One item of a batch: the number of its task, its row, its media."""


def _alike(items: Iterable[Item], max_batch: int) -> Iterator[Sequence[Item]]:
    """Neighbours of one shape and speed, at most max_batch of them at a time."""
    for _, some in itertools.groupby(items, key=lambda item: (item[2].shape, item[1]["fps"])):
        yield from chunks(list(some), max_batch)


def _short(reason: str | None) -> str | None:
    """Bounded, and without the half surrogate pairs that no message can carry."""
    return None if reason is None else reason[:REASON_CHARS].encode(errors="replace").decode()


if __name__ == "__main__":
    sys.exit(run(load))
