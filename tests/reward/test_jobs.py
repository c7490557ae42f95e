"""Jobs of the HTTP API with a real broker: stored media and scores, lifetime and deadlines."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.worker import LeaseWorker
from wfm_reward.web.jobs import ScoreJobs
from wfm_reward.web.request_body import MemoryBudget, Reservation
from wfm_reward.web.requests import HttpProblem, ScoreRequest

DEADLINE_S = 30.0


class Pixels(np.ndarray):
    """Array type for weak references."""


def request_of(count):
    media = [np.full((4, 4, 3), i, np.uint8).view(Pixels) for i in range(count)]
    return ScoreRequest(("mean",), ["x"] * count, [{}] * count, [None] * count, media, False, {"of": count})


def reserved(budget, num_bytes):
    reservation = Reservation(budget)
    reservation.grow(num_bytes)
    return reservation


def means(task, _):
    return {"scores": [(float(t.mean()), None, {}) for t in task.read_tensors()]}


def run_jobs(tmp_path, handle, use, ttl_s=1000.0, kind="score:mean", at_end=lambda: None):
    """Run `use(jobs, budget)` in an event loop, next to a broker with one worker in a thread. Then call `at_end`."""

    async def main():
        jobs, budget = ScoreJobs(hub.client_endpoint, {"mean": 1}, ttl_s, None), MemoryBudget(10000)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await use(jobs, budget)
        finally:
            await asyncio.to_thread(jobs.close)

    hub = Broker(clients=f"ipc://{tmp_path}/c", workers=f"ipc://{tmp_path}/w", kinds={kind: TaskKind(60.0, {})})
    hub.start()
    worker = LeaseWorker(hub.worker_endpoint, worker="w", name="w", kinds=[kind])
    thread = threading.Thread(target=worker.run, args=(handle,), daemon=True)
    thread.start()
    try:
        asyncio.run(main())
    finally:
        at_end()
        worker.stop()
        thread.join(DEADLINE_S)
        hub.stop(0.0)


async def until(condition):
    """Wait for `condition`; the timeout of `run_jobs` applies."""
    while not condition():
        await asyncio.sleep(0.01)


def test_media_are_freed_after_scoring_and_scores_are_kept(tmp_path):
    async def use(jobs, budget):
        request = request_of(2)
        watched = [weakref.ref(array) for array in request.media]
        job = jobs.start_job(request, reserved(budget, 96), DEADLINE_S, None)
        del request
        await job.results["mean"].done.wait()
        await until(lambda: budget.reserved_bytes == 0)
        await until(lambda: gc.collect() >= 0 and not any(ref() is not None for ref in watched))
        assert [value for value, _, _ in jobs.find_job(job.id).results["mean"].items] == [0.0, 1.0]
        assert job.info == {"of": 2}

    run_jobs(tmp_path, means, use)


def test_a_new_job_removes_expired_jobs(tmp_path):
    async def use(jobs, budget):
        first = jobs.start_job(request_of(1), reserved(budget, 48), DEADLINE_S, None)
        await until(lambda: first.finished_at_s is not None)
        second = jobs.start_job(request_of(1), reserved(budget, 48), DEADLINE_S, None)
        assert list(jobs._jobs) == [second.id]
        jobs.forget_job(second)
        with pytest.raises(HttpProblem) as problem:
            jobs.find_job(second.id)
        assert problem.value.status == 404
        await until(lambda: second.finished_at_s is not None)

    run_jobs(tmp_path, means, use, ttl_s=1e-9)


def test_after_its_deadline_a_job_keeps_what_is_scored_and_waits_for_no_worker(tmp_path):
    go_on = threading.Event()

    def handle(task, progress):
        if task.read_tensors()[0].any():
            go_on.wait(DEADLINE_S)
        return means(task, progress)

    async def use(jobs, budget):
        job = jobs.start_job(request_of(3), reserved(budget, 144), DEADLINE_S, None)
        await until(lambda: len(jobs._pieces) == 2)
        jobs._abandon_pieces(list(jobs._pieces))  # called by the job's timer
        await job.results["mean"].done.wait()
        values, failures, _ = zip(*job.results["mean"].items, strict=True)
        assert (values[1:], failures[1:]) == ((None, None), ("deadline", "deadline"))
        assert (values[0], failures[0]) == (0.0, None)
        await until(lambda: budget.reserved_bytes == 0)

    run_jobs(tmp_path, handle, use, at_end=go_on.set)


def test_a_video_that_is_decoded_too_late_is_removed(tmp_path):
    begun, go_on, written = threading.Event(), threading.Event(), threading.Event()
    path = tmp_path / "late.npy"

    def handle(task, _):
        begun.set()
        go_on.wait(DEADLINE_S)
        path.touch()
        written.set()
        return {"videos": [(str(path), None, {})]}

    async def use(jobs, budget):
        job = jobs.start_job(request_of(1), reserved(budget, 48), DEADLINE_S, "decode:16")
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        jobs._abandon_pieces(list(jobs._pieces))  # called by the job's timer
        await job.results["mean"].done.wait()
        assert job.results["mean"].items == [(None, "deadline", {})]
        go_on.set()
        assert await asyncio.to_thread(written.wait, DEADLINE_S)
        await until(lambda: not path.exists())

    run_jobs(tmp_path, handle, use, kind="decode:16", at_end=go_on.set)
