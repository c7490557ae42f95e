"""Requests of HTTP clients on their way through the hub: submitted, booked as they are scored, kept to be pulled.

Owned by the port's event loop; one thread beside it waits for the hub's outcomes.
"""

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
from typing import Any, TypeAlias

import numpy as np

from wfm_ds.pipes.client import PipeClient, TaskOutcome
from wfm_ds.pipes.keys import ClientKeys
from wfm_ds.pipes.submission import Piece, submit_in_pieces
from wfm_ds.pipes.wire import Array
from wfm_reward.web.budget import Reservation
from wfm_reward.web.problem import HttpProblem
from wfm_reward.web.request import ScoreRequest

log = logging.getLogger(__name__)

MAX_REMEMBERED = 10000  # ids of jobs that have expired
TICK_S = 0.5
GRACE_S = 1.0  # after a deadline, for the hub to say first what it knows of the tasks

ItemAnswer: TypeAlias = tuple[float | None, str | None, dict[str, float]]
"""One item: value, failure, parts."""


@dataclass(slots=True)
class Answers:
    """Answers of one kind of worker for the rows of one submission, as they arrive."""

    rows: list[Any]
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.0

    def put(self, start: int, answers: Sequence[Any], seconds: float) -> None:
        self.rows[start : start + len(answers)] = answers
        self.seconds += seconds
        self.left -= len(answers)
        if self.left <= 0:
            self.done.set()


@dataclass(slots=True)
class ScoreJob:
    """One request. Its media are held while it runs, and not by the job."""

    id: str
    info: Mapping[str, Any]  # the request's
    results: dict[str, Answers]  # by reward, in the request's order
    decode_s: float = 0.0
    finished_at_s: float | None = None


class Jobs:
    """Create and use within the event loop; `close` ends the thread."""

    def __init__(
        self, endpoint: str, max_batch: Mapping[str, int], result_ttl_s: float, keys: ClientKeys | None
    ) -> None:
        """`max_batch`: the largest batch by reward."""
        self.max_batch = dict(max_batch)
        self._ttl_s = result_ttl_s
        self._jobs: dict[str, ScoreJob] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._pieces: dict[str, tuple[Piece, Answers]] = {}
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[None]] = set()
        self._name = uuid.uuid4().hex[:12]
        self._pipe = PipeClient(endpoint, run="http", client=self._name, keys=keys)
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="http results", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. May block for a moment: call it outside the event loop."""
        self._closing.set()
        self._pipe.close()
        self._thread.join(5)

    def start(self, request: ScoreRequest, reservation: Reservation, timeout_s: float, decoder: str | None) -> ScoreJob:
        """Submit the request. `reservation`: the bytes of its media, released when all is scored. `decoder`: the kind
        of worker that decodes its latents."""
        self._expire()
        count = len(request.prompts)
        results = {reward: Answers([None] * count, count) for reward in request.rewards}
        job = ScoreJob(str(uuid.uuid4()), request.info, results)
        self._jobs[job.id] = job
        task = self._loop.create_task(self._run(job, request, reservation, time.monotonic() + timeout_s, decoder))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return job

    def find(self, job_id: str) -> ScoreJob:
        """Raises HttpProblem: 410 for a job that has expired, 404 for one that never was."""
        self._expire()
        if job_id in self._expired:
            raise HttpProblem(410, "expired", f"the scores of {job_id} were kept for {self._ttl_s:g} s")
        if job_id not in self._jobs:
            raise HttpProblem(404, "unknown_uuid", f"there is no request {job_id[:64]!r} here")
        return self._jobs[job_id]

    def forget(self, job: ScoreJob) -> None:
        """Drop a job that nobody will pull."""
        self._jobs.pop(job.id, None)

    async def _run(
        self, job: ScoreJob, request: ScoreRequest, reservation: Reservation, deadline_s: float, decoder: str | None
    ) -> None:
        try:
            media: Sequence[Array | str] = request.media
            if decoder is not None:
                started = time.monotonic()
                media = await self._decoded(request, decoder, deadline_s)
                job.decode_s = time.monotonic() - started
            await self._scored(job, request, media, deadline_s)
        except Exception as error:  # the border of the task: it becomes named failures
            log.exception("request %s failed", job.id)
            for answers in job.results.values():
                _fail_rest(answers, f"{type(error).__name__}: {error}")
        finally:
            reservation.release()
            job.finished_at_s = time.monotonic()

    async def _scored(
        self, job: ScoreJob, request: ScoreRequest, media: Sequence[Array | str], deadline_s: float
    ) -> None:
        """Have the items scored. `media`: an item's array, or why there is none."""
        there = [i for i, item in enumerate(media) if not isinstance(item, str)]
        rows = [_row(job.id, request, i) for i in there]
        arrays = [item for item in media if not isinstance(item, str)]
        inner = {reward: Answers([None] * len(there), len(there)) for reward in job.results}
        max_rows = {f"score:{reward}": self.max_batch[reward] for reward in job.results}
        timer = self._submit(rows, arrays, max_rows, {f"score:{r}": a for r, a in inner.items()}, deadline_s)
        for answers in job.results.values():
            for i, item in enumerate(media):
                if isinstance(item, str):
                    answers.put(i, [(None, item, {})], 0.0)
        await asyncio.gather(*(self._passed_on(inner[r], a, there) for r, a in job.results.items()))
        timer.cancel()

    async def _passed_on(self, inner: Answers, outer: Answers, places: Sequence[int]) -> None:
        """Hand on the answers of one reward: rewards finish, and can be pulled, one after the other."""
        if places:
            await inner.done.wait()
        for place, answer in zip(places, inner.rows, strict=True):
            outer.put(place, [answer], 0.0)
        outer.seconds = inner.seconds

    async def _decoded(self, request: ScoreRequest, decoder: str, deadline_s: float) -> list[Array | str]:
        """Videos, or the reason why there is none. A decoder leaves each in a file, which ends here."""
        rows = [{"id": f"latents-{i}"} for i in range(len(request.media))]
        answers = Answers([None] * len(rows), len(rows))
        timer = self._submit(rows, list(request.media), {decoder: 1}, {decoder: answers}, deadline_s)
        await answers.done.wait()
        timer.cancel()
        return [await asyncio.to_thread(_video, answer) for answer in answers.rows]

    def _submit(
        self,
        rows: Sequence[Mapping[str, Any]],
        arrays: Sequence[Array],
        max_rows: Mapping[str, int],
        answers: Mapping[str, Answers],
        deadline_s: float,
    ) -> asyncio.TimerHandle:
        """Submit rows to workers. Return the timer that ends the waiting for those still busy after the deadline."""
        sent = []
        for piece in submit_in_pieces(self._pipe, rows, arrays, max_rows, self._new_id, deadline_s):
            if piece.failure is not None:
                answers[piece.kind].put(piece.start, [(None, piece.failure, {})] * (piece.stop - piece.start), 0.0)
            else:
                self._pieces[piece.id] = (piece, answers[piece.kind])
                sent.append(piece.id)
        wait_s = max(0.0, deadline_s - time.monotonic()) + GRACE_S
        return self._loop.call_later(wait_s, self._give_up, sent)

    def _give_up(self, ids: Sequence[str]) -> None:
        late = [self._pieces.pop(piece_id) for piece_id in ids if piece_id in self._pieces]
        for piece, answers in late:
            answers.put(piece.start, [(None, "deadline", {})] * (piece.stop - piece.start), 0.0)
        # A decoder is let finish: only its answer says where the file is that has to go.
        self._pipe.cancel(piece.id for piece, _ in late if not piece.kind.startswith("decode:"))

    def _new_id(self, kind: str) -> str:
        return f"{self._name}/{next(self._numbers)}#{kind}"

    def _collect(self) -> None:
        """Wait for outcomes, in the thread."""
        while not self._closing.is_set():
            outcomes = self._pipe.take(TICK_S)
            if outcomes:
                try:
                    self._loop.call_soon_threadsafe(self._book, outcomes)
                except RuntimeError:  # the loop was closed meanwhile: nobody waits for them
                    return

    def _book(self, outcomes: Sequence[TaskOutcome]) -> None:
        for outcome in outcomes:
            found = self._pieces.pop(outcome.id, None)
            if found is None:
                _discard(outcome)
                continue
            piece, answers = found
            rows = outcome.meta.get("scores", outcome.meta.get("videos")) if outcome.ok else None
            if not isinstance(rows, list | tuple) or len(rows) != piece.stop - piece.start:
                reason = outcome.reason or "its worker's answer cannot be read"
                rows = [(None, reason, {})] * (piece.stop - piece.start)
            answers.put(piece.start, list(rows), outcome.seconds)

    def _expire(self) -> None:
        """Drop what is older than a result's time; the oldest are first."""
        limit_s = time.monotonic() - self._ttl_s
        finished = ((i, job.finished_at_s) for i, job in self._jobs.items() if job.finished_at_s is not None)
        for job_id, _ in list(itertools.takewhile(lambda one: one[1] <= limit_s, finished)):
            del self._jobs[job_id]
            self._expired[job_id] = None
        while len(self._expired) > MAX_REMEMBERED:
            self._expired.popitem(last=False)


def _row(job_id: str, request: ScoreRequest, i: int) -> dict[str, Any]:
    return {
        "id": f"{job_id[:8]}-{i}",
        "prompt": request.prompts[i],
        "metadata": dict(request.metadata[i]),
        "fps": request.fps[i],
    }


def _video(answer: Any) -> Array | str:
    """Load the video that a decoder left in a file: uint8 [T,H,W,3], or why there is none."""
    path, failure, _ = answer
    if failure is not None:
        return str(failure)
    video: Array = np.load(path, allow_pickle=False)
    Path(path).unlink()
    return video


def _discard(outcome: TaskOutcome) -> None:
    """Remove a video that came when nobody waited for it any more: nobody else does."""
    videos = outcome.meta.get("videos") if outcome.ok else None
    for path, _, _ in videos or []:
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _fail_rest(answers: Answers, why: str) -> None:
    for i, answer in enumerate(answers.rows):
        if answer is None:
            answers.put(i, [(None, why, {})], 0.0)
