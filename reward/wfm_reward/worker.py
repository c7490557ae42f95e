"""`python -m wfm_reward.worker`: worker process that computes one reward. The service starts this process."""

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

from wfm_ds.chunks import split_into_chunks
from wfm_ds.errors import describe_error
from wfm_ds.transport.arrays import split_sound, unpack_arrays
from wfm_ds.transport.wire import Array
from wfm_ds.transport.worker import LeasedTask, ReportProgress, TaskFailed
from wfm_ds.types import MediaBatch, Score
from wfm_reward import registry
from wfm_reward.base import Reward, RewardError
from wfm_reward.frames import score_frames
from wfm_reward.worker_process import WorkerSetup, run_worker

log = logging.getLogger(__name__)

REASON_CHARS = 200  # maximum length of a failure reason
ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "prompt": str,
    "metadata": dict,
    "fps": (int, float, type(None)),
}


def load_scorer(settings: Mapping[str, Any]) -> WorkerSetup:
    reward = registry.create_reward(settings["reward"], settings["device"], settings["options"])
    reward.load()
    time_limit_s = settings["stall_s"] - min(60.0, 0.1 * settings["stall_s"])
    scoring = RewardScorer(reward, settings["reward"], settings["max_batch"], time_limit_s)
    wait_s = settings["max_wait_ms"] / 1000
    # Without a wait, one batch per task, so that scores do not depend on other requests.
    return WorkerSetup(scoring.score_tasks, settings["stall_s"], settings["max_batch"] if wait_s else 1, wait_s)


@dataclass(frozen=True, slots=True)
class RewardScorer:
    """Computes a reward and validates its scores: each has a finite value or a failure reason."""

    reward: Reward
    name: str  # name in the recipe
    max_batch: int
    time_limit_s: float = math.inf  # per batch

    def score_tasks(
        self, tasks: Sequence[LeasedTask], progress: ReportProgress
    ) -> list[Mapping[str, Any] | TaskFailed]:
        """Score several tasks. Return {"scores": [[value, failure, parts] per row], "batch": batch size} for each task.

        A row is {id, prompt, metadata, fps?, inputs?, reference?, images?, sound?, sound_rate?} with a tensor uint8
        [H,W,3] or [T,H,W,3]. If `sound` is [channels, samples], the last frames are the sound (see append_sound). If
        `images` names k input images, they are the last k frames before it. If `reference` is R > 0, the last R frames
        before them are the reference. Consecutive rows with the same shape and fps form batches of at most
        `max_batch` rows. For a malformed task, TaskFailed is returned.
        """
        task_rows = [_read_rows(task) for task in tasks]
        items = [
            (number, row, tensor)
            for number, rows in enumerate(task_rows)
            if not isinstance(rows, TaskFailed)
            for row, tensor in rows
        ]
        replies: list[dict[str, Any]] = [{"scores": [], "batch": 0} for _ in tasks]
        num_done = 0
        for batch in _group_alike(items, self.max_batch):
            numbers, rows, tensors = zip(*batch, strict=True)
            for number, score in zip(numbers, self.score_items(rows, tensors), strict=True):
                failure = score.failure and score.failure[:REASON_CHARS].encode(errors="replace").decode()
                replies[number]["scores"].append([score.value, failure, dict(score.parts)])
                replies[number]["batch"] = len(batch)
                num_done += 1
                progress(num_done, len(items))
        return [r if isinstance(r, TaskFailed) else reply for r, reply in zip(task_rows, replies, strict=True)]

    def score_items(self, rows: Sequence[Mapping[str, Any]], tensors: Sequence[Array]) -> Iterator[Score]:
        """Yield the scores of a batch. If the reward raises an exception, each item is scored separately."""
        scores: Iterable[Score]
        try:
            scores = self.score_batch(rows, tensors)
        except Exception as error:  # third-party code may raise anything; it becomes failures with a reason
            if len(rows) > 1:
                log.info("%s failed on a batch of %d items (%s); scoring them one by one", self.name, len(rows), error)
                pairs = zip(rows, tensors, strict=True)
                scores = (score for row, tensor in pairs for score in self.score_items([row], [tensor]))
            else:
                log.warning("%s failed on %s", self.name, rows[0]["id"], exc_info=True)
                scores = [self._failure_score(rows[0]["id"], describe_error(error))]
        yield from scores

    def score_batch(self, rows: Sequence[Mapping[str, Any]], tensors: Sequence[Array]) -> list[Score]:
        """Score rows with the same shape and fps as one batch. Raises any exception that the reward raises.

        Raises RewardError for missing metadata or inputs and for a wrong number of scores.
        """
        self.reward.deadline_s = time.monotonic() + self.time_limit_s
        batch = MediaBatch(
            media=np.stack(tensors),
            sample_ids=[row["id"] for row in rows],
            prompts=[row["prompt"] for row in rows],
            metadata=[row["metadata"] for row in rows],
            fps=rows[0]["fps"],
            reward=self.name,
            inputs=[row.get("inputs", {}) for row in rows],
            references=[row.get("reference") for row in rows],
            images=[row.get("images", {}) for row in rows],
            sounds=[row.get("sound") for row in rows],
            sound_rate=rows[0].get("sound_rate"),
        )
        video = batch.media.ndim == 5
        if not video and "image" not in self.reward.media_types:
            return [item.fail("the reward accepts only videos, but the sample is an image") for item in batch]
        needs, inputs = self.reward.required_metadata, self.reward.required_inputs
        missing = {key for item in batch for key in needs if key not in item.metadata}
        missing |= {key for item in batch for key in inputs if key not in item.inputs}
        if self.reward.needs_reference and any(item.reference is None for item in batch):
            missing.add("reference")
        if self.reward.needs_sound and any(item.sound is None for item in batch):
            missing.add("sound")
        if missing:
            raise RewardError(f"missing metadata or inputs: {', '.join(sorted(missing))}")
        if video and "video" not in self.reward.media_types:
            return score_frames(self.score_media, batch, self.reward.frames, self.max_batch)
        return self.score_media(batch)

    def score_media(self, batch: MediaBatch) -> list[Score]:
        """Score images or videos. The reward must accept their media type. Raises the same errors as `score_batch`."""
        start_s = time.monotonic()
        scores = self.reward.score(batch)
        if not isinstance(scores, list) or len(scores) != len(batch):
            size = len(scores) if isinstance(scores, list) else f"a {type(scores).__name__}, not a list of"
            raise RewardError(f"score() returned {size} scores for {len(batch)} items")
        seconds = (time.monotonic() - start_s) / len(batch)
        return [self._check_score(item.sample_id, score, seconds) for item, score in zip(batch, scores, strict=True)]

    def _check_score(self, sample_id: str, score: Any, seconds: float) -> Score:
        if failure := self._find_failure(sample_id, score):
            return self._failure_score(sample_id, failure, seconds)
        parts = {output: float(value) for output, value in score.parts.items()}
        return Score(sample_id=sample_id, reward=self.name, value=float(score.value), seconds=seconds, parts=parts)

    def _find_failure(self, sample_id: str, score: Any) -> str:
        """Return the reason why a score is not valid, or ""."""
        if not isinstance(score, Score):
            return f"score() returned a {type(score).__name__} instead of a Score"
        if score.sample_id != sample_id:
            return f"score() returned the score of {score.sample_id!r} in its place"
        if score.value is None:
            return score.failure or "no reason given"
        for output, value in {**score.parts, self.reward.primary_output: score.value}.items():
            limits = self.reward.outputs.get(output)
            if not math.isfinite(value):
                return f"{output} = {value} is not finite"
            if limits is not None and value not in limits:
                return f"{output} = {value:g} is outside {limits.low:g} to {limits.high:g}"
        return ""

    def _failure_score(self, sample_id: str, reason: str, seconds: float = 0.0) -> Score:
        return Score(sample_id=sample_id, reward=self.name, failure=reason, seconds=seconds)


def _read_rows(task: LeasedTask) -> list[tuple[Mapping[str, Any], Array]] | TaskFailed:
    """Return (row, tensor) for each item of a task, or TaskFailed if the client sent something invalid."""
    try:
        tensors = task.read_tensors()
    except TaskFailed as error:
        return error
    if len(tensors) != len(task.rows) or any(t.dtype != np.uint8 or t.ndim not in (3, 4) for t in tensors):
        return TaskFailed("each item needs a uint8 array of shape [H,W,3] or [T,H,W,3]", fatal=True)
    for number, row in enumerate(task.rows):
        invalid = [key for key, kind in ROW_TYPES.items() if not isinstance(row.get(key), kind)]
        if invalid:
            return TaskFailed(f"row {number}: missing or wrong type: {' and '.join(invalid)}", fatal=True)
    try:
        inputs = [unpack_arrays(row.get("inputs", {})) for row in task.rows]
    except ValueError as error:
        return TaskFailed(f"the inputs cannot be read: {error}", fatal=True)
    items: list[tuple[Mapping[str, Any], Array]] = []
    for number, (row, row_inputs, tensor) in enumerate(zip(task.rows, inputs, tensors, strict=True)):
        try:
            frames, sound = _split_sound(row, tensor)
            frames, images = _split_images(row.get("images"), frames)
        except ValueError as error:
            return TaskFailed(f"row {number}: {error}", fatal=True)
        count, reference = row.get("reference"), None
        if count is not None:
            if type(count) is not int or frames.ndim != 4 or not 0 < count <= len(frames) // 2:
                return TaskFailed(f"row {number}: wrong number of reference frames: {count!r:.50}", fatal=True)
            frames, reference = frames[:-count], frames[-count:]
        if images and row.get("fps") is None:  # an image; with input images, it was sent as a frame
            frames = frames[0]
        arrays = {"inputs": row_inputs, "reference": reference, "images": images, "sound": sound}
        items.append(({"fps": None, **row, **arrays}, frames))
    return items


def _split_sound(row: Mapping[str, Any], tensor: Array) -> tuple[Array, Array | None]:
    """Return the frames without the sound, and the sound or None. Raises ValueError for a malformed row."""
    if row.get("sound") is None:
        return tensor, None
    rate = row.get("sound_rate")
    if type(rate) is not int or rate < 1:
        raise ValueError(f"sound_rate must be a positive integer, got {rate!r:.50}")
    return split_sound(row["sound"], tensor)


def _split_images(names: Any, tensor: Array) -> tuple[Array, dict[str, Array]]:
    """Return the sample's own frames, and {name: input image} of the last frames. Raises ValueError for bad names."""
    if names is None:
        return tensor, {}
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"images must be a list of names, got {names!r:.50}")
    if tensor.ndim != 4 or len(tensor) <= len(names) or len(set(names)) < len(names):
        raise ValueError(f"{len(names)} input images do not fit an array of shape {list(tensor.shape)}")
    return tensor[: -len(names)], dict(zip(names, tensor[-len(names) :], strict=True))


TaskItem: TypeAlias = tuple[int, Mapping[str, Any], Array]
"""An item of a batch: (index of its task, row of the task, pixels uint8)."""


def _group_alike(items: Iterable[TaskItem], max_batch: int) -> Iterator[Sequence[TaskItem]]:
    """Group consecutive items with the same shape, fps and sound rate into batches of at most `max_batch`."""
    keys = ("fps", "sound_rate")
    for _, group in itertools.groupby(items, key=lambda item: (item[2].shape, *(item[1].get(key) for key in keys))):
        yield from split_into_chunks(list(group), max_batch)


if __name__ == "__main__":
    sys.exit(run_worker(load_scorer))
