"""Scoring jobs of HTTP clients: submit items to the broker, and keep the scores until the client pulls them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.errors import describe_error
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.keys import ClientKeys
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.transport.wire import Array
from wfm_reward.web.request_body import Reservation
from wfm_reward.web.requests import HttpProblem, ScoreRequest

log = logging.getLogger(__name__)

MAX_EXPIRED_IDS = 10000  # ids of expired jobs to remember
TICK_S = 0.5
GRACE_S = 1.0  # seconds to wait after a deadline, so that the broker can report first


@dataclass(slots=True)
class ItemResults:
    """Results of one reward or decoder for the rows of a submission. They are filled in as they arrive."""

    items: list[Any]  # (value, failure reason, parts) each, or None
    num_missing: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.0

    def put(self, indices: Sequence[int], results: Sequence[Any], seconds: float = 0.0) -> None:
        for index, result in zip(indices, results, strict=True):
            self.items[index] = result
        self.seconds += seconds
        self.num_missing -= len(results)
        if self.num_missing <= 0:
            self.done.set()

    def fail(self, indices: Sequence[int], reason: str) -> None:
        self.put(indices, [(None, reason, {})] * len(indices))


@dataclass(slots=True)
class ScoreJob:
    """One scoring request of a client, with its results but without its images and videos."""

    id: str
    info: Mapping[str, Any]  # of the request
    results: dict[str, ItemResults]  # by reward, in the order of the request
    decode_s: float = 0.0
    finished_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A submitted task, and the positions of its rows in `results`."""

    task: TaskRequest
    results: ItemResults
    indices: Sequence[int]  # of its rows in `results`


class ScoreJobs:
    """All jobs of the server. Create and use this object within the event loop."""

    def __init__(
        self, endpoint: str, max_batch: Mapping[str, int], result_ttl_s: float, keys: ClientKeys | None
    ) -> None:
        self.max_batch = dict(max_batch)
        self._ttl_s = result_ttl_s
        self._jobs: dict[str, ScoreJob] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._pieces: dict[str, _Piece] = {}
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex[:12]
        self._client = PipeClient(endpoint, run="http", client=self._name, keys=keys)
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._collect_outcomes, name="http results", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks briefly, so call it outside the event loop."""
        self._closing.set()
        self._client.close()
        self._thread.join(5)

    def start_job(
        self, request: ScoreRequest, reservation: Reservation, timeout_s: float, decoder: str | None
    ) -> ScoreJob:
        """Submit a scoring request. Releases its memory `reservation` when all items are scored.

        decoder: task kind that decodes the latents of the request. None if the request has pixels.
        """
        self._expire_jobs()
        count = len(request.prompts)
        results = {reward: ItemResults([None] * count, count) for reward in request.rewards}
        job = ScoreJob(str(uuid.uuid4()), request.info, results)
        self._jobs[job.id] = job
        task = self._loop.create_task(self._run_job(job, request, reservation, time.monotonic() + timeout_s, decoder))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return job

    def find_job(self, job_id: str) -> ScoreJob:
        """Return a job by id. Raises HttpProblem 410 for an expired job, 404 for an unknown one."""
        self._expire_jobs()
        if job_id in self._expired:
            raise HttpProblem(410, "expired", f"the scores of {job_id} expired after {self._ttl_s:g} s")
        if job_id not in self._jobs:
            raise HttpProblem(404, "unknown_uuid", f"unknown request {job_id[:64]!r}")
        return self._jobs[job_id]

    def forget_job(self, job: ScoreJob) -> None:
        self._jobs.pop(job.id, None)

    async def _run_job(
        self, job: ScoreJob, request: ScoreRequest, reservation: Reservation, deadline_s: float, decoder: str | None
    ) -> None:
        try:
            media: Sequence[Array | str] = request.media
            if decoder is not None:
                start_s = time.monotonic()
                media = await self._decode_latents(request, decoder, deadline_s)
                job.decode_s = time.monotonic() - start_s
            await self._score_items(job, request, media, deadline_s)
        except Exception as error:  # no code awaits this task, so errors become failures with a reason
            log.exception("request %s failed", job.id)
            for results in job.results.values():
                missing = [i for i, item in enumerate(results.items) if item is None]
                results.fail(missing, describe_error(error))
        finally:
            reservation.release()
            job.finished_at_s = time.monotonic()

    async def _score_items(
        self, job: ScoreJob, request: ScoreRequest, media: Sequence[Array | str], deadline_s: float
    ) -> None:
        for i, item in enumerate(media):
            if isinstance(item, str):
                for results in job.results.values():
                    results.fail([i], item)
        indices = [i for i, item in enumerate(media) if not isinstance(item, str)]
        rows = [
            {
                "id": f"{job.id[:8]}-{i}",
                "prompt": request.prompts[i],
                "metadata": dict(request.metadata[i]),
                "fps": request.fps[i],
            }
            for i in indices
        ]
        arrays = [item for item in media if not isinstance(item, str)]
        max_rows = {f"score:{reward}": self.max_batch[reward] for reward in job.results}
        by_kind = {f"score:{reward}": results for reward, results in job.results.items()}
        timer = self._submit_rows(rows, arrays, max_rows, by_kind, indices, deadline_s)
        await asyncio.gather(*(results.done.wait() for results in job.results.values()))
        timer.cancel()

    async def _decode_latents(self, request: ScoreRequest, decoder: str, deadline_s: float) -> list[Array | str]:
        """Return the decoded video of each item, or the reason why decoding failed. Removes the decoder's files."""
        rows = [{"id": f"latents-{i}"} for i in range(len(request.media))]
        results = ItemResults([None] * len(rows), len(rows))
        timer = self._submit_rows(
            rows, list(request.media), {decoder: 1}, {decoder: results}, range(len(rows)), deadline_s
        )
        await results.done.wait()
        timer.cancel()
        return [await asyncio.to_thread(_load_video, result) for result in results.items]

    def _submit_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        arrays: Sequence[Array],
        max_rows: Mapping[str, int],
        results: Mapping[str, ItemResults],
        indices: Sequence[int],
        deadline_s: float,
    ) -> asyncio.TimerHandle:
        """Submit rows to workers. Returns the timer that abandons unfinished tasks after the deadline."""
        piece_ids = []
        for task in self._client.submit_rows(rows, arrays, max_rows, self._new_task_id, deadline_s):
            piece = _Piece(task, results[task.kind], indices[task.start : task.stop])
            if task.failure is not None:
                piece.results.fail(piece.indices, task.failure)
            else:
                self._pieces[task.id] = piece
                piece_ids.append(task.id)
        wait_s = max(0.0, deadline_s - time.monotonic()) + GRACE_S
        return self._loop.call_later(wait_s, self._abandon_pieces, piece_ids)

    def _abandon_pieces(self, ids: Sequence[str]) -> None:
        late = [self._pieces.pop(piece_id) for piece_id in ids if piece_id in self._pieces]
        for piece in late:
            piece.results.fail(piece.indices, "deadline")
        # Decoders are not cancelled: their reply contains the path of the file to remove.
        self._client.cancel(piece.task.id for piece in late if not piece.task.kind.startswith("decode:"))

    def _new_task_id(self, kind: str) -> str:
        return f"{self._name}/{next(self._numbers)}#{kind}"

    def _collect_outcomes(self) -> None:
        while not self._closing.is_set():
            outcomes = self._client.take_outcomes(TICK_S)
            if outcomes:
                try:
                    self._loop.call_soon_threadsafe(self._record_outcomes, outcomes)
                except RuntimeError:  # the event loop has been closed
                    return

    def _record_outcomes(self, outcomes: Sequence[TaskOutcome]) -> None:
        for outcome in outcomes:
            piece = self._pieces.pop(outcome.id, None)
            if piece is None:
                _discard_videos(outcome)
                continue
            rows = outcome.meta.get("scores", outcome.meta.get("videos")) if outcome.ok else None
            if isinstance(rows, list | tuple) and len(rows) == len(piece.indices):
                piece.results.put(piece.indices, rows, outcome.seconds)
            else:
                piece.results.fail(piece.indices, outcome.reason or "the reply of its worker cannot be read")

    def _expire_jobs(self) -> None:
        limit_s = time.monotonic() - self._ttl_s
        finished = ((i, job.finished_at_s) for i, job in self._jobs.items() if job.finished_at_s is not None)
        for job_id, _ in list(itertools.takewhile(lambda job: job[1] <= limit_s, finished)):
            del self._jobs[job_id]
            self._expired[job_id] = None
        while len(self._expired) > MAX_EXPIRED_IDS:
            self._expired.popitem(last=False)


def _load_video(result: Any) -> Array | str:
    """Load and remove a decoded video file. Return uint8 [T,H,W,3], or the failure reason."""
    path, failure, _ = result
    if failure is not None:
        return str(failure)
    video: Array = np.load(path, allow_pickle=False)
    Path(path).unlink()
    return video


def _discard_videos(outcome: TaskOutcome) -> None:
    videos = outcome.meta.get("videos") if outcome.ok else None
    for path, _, _ in videos or []:
        if path is not None:
            Path(path).unlink(missing_ok=True)
