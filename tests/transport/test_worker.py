"""Workers: the attempt that they report for a task, and the fate of a task after its worker ends."""

import sys
import threading

import pytest

from transport.peers import DEADLINE_S, RawHub, a_client, a_hub, a_worker, collect, submit
from wfm_ds.transport.ledger import MAX_ATTEMPTS


class Steps:
    """Task handler that waits until the test releases `go_on`."""

    def __init__(self):
        self.began = []  # (id, attempt)
        self.go_on = threading.Semaphore(0)

    def __call__(self, task, progress):
        self.began.append((task.id, task.attempt))
        for done in (1, 2):
            progress(done, 2)
            assert self.go_on.acquire(timeout=DEADLINE_S)
        if task.id == "fails":
            raise ZeroDivisionError("no")
        return {}


class LeasingHub(RawHub):
    def lease(self, task_id, attempt):
        self.say("task", id=task_id, attempt=attempt, kind="work", rows=[{}], note={})

    def hear_mark(self, *mark):
        for _ in range(1000):
            if self.hear("beat")["progress"] == [list(mark)]:
                return
        raise AssertionError(f"no mark {mark}")


@pytest.fixture
def hub(stack):
    return LeasingHub(stack)


@pytest.fixture
def steps(stack, hub):
    steps = Steps()
    a_worker(stack, hub.endpoint, steps, credit=2, ends_process=False)
    stack.callback(steps.go_on.release, 100)
    hub.hear("hello")
    hub.say("welcome", hub="1", beat_s=0.05)
    return steps


def test_a_running_task_that_is_leased_again_is_reported_under_the_new_lease(hub, steps):
    for task_id, ends_as in (("works", "result"), ("fails", "failed")):
        hub.lease(task_id, 1)
        hub.hear_mark(task_id, 1, 1, 2)
        hub.lease(task_id, 3)  # the broker had lost the worker for a while
        steps.go_on.release()
        hub.hear_mark(task_id, 3, 2, 2)
        steps.go_on.release()
        assert hub.hear(ends_as)["attempt"] == 3
        hub.say("ack", ids=[task_id])
    assert steps.began == [("works", 1), ("fails", 1)], "neither is done twice"


def test_a_returned_task_that_is_leased_again_is_reported_under_the_new_lease(hub, steps):
    hub.lease("works", 1)
    hub.hear_mark("works", 1, 1, 2)
    hub.lease("later", 1)
    hub.say("stalled", id="later", attempt=1)
    assert hub.hear("failed")["reason"] == "not started"
    hub.lease("later", 2)
    steps.go_on.release(4)
    assert hub.hear("result")["id"] == "works"
    hub.say("ack", ids=["works"])
    answer = hub.hear("result")
    assert (answer["id"], answer["attempt"]) == ("later", 2)
    assert steps.began == [("works", 1), ("later", 2)]


def test_a_worker_returns_a_lease_without_its_task(hub, steps):
    """Otherwise the broker would reserve the worker's slot for this task and never lease it another."""
    hub.say("stalled", id="t", attempt=7)
    failed = hub.hear("failed")
    assert (failed["id"], failed["attempt"], failed["reason"]) == ("t", 7, "not received")


def test_workers_that_leave_in_the_middle_of_a_task_are_not_its_attempts(stack):
    hub = a_hub(stack, stall_s=600.0)
    client = a_client(stack, hub)
    submit(client, "t")
    released = threading.Event()
    for name in range(MAX_ATTEMPTS + 1):
        at_work = threading.Event()

        def endless(task, progress, at_work=at_work):
            at_work.set()
            released.wait(DEADLINE_S)  # a timeout means that the test has failed
            return {}

        worker, _ = a_worker(stack, hub, endless, f"w{name}", ends_process=False)
        assert at_work.wait(DEADLINE_S)
        worker.stop()
        assert worker.disconnected.wait(DEADLINE_S), "it does not wait for its task"
    a_worker(stack, hub, lambda task, progress: {"attempt": task.attempt}, "patient")
    outcome = collect(client)["t"]
    released.set()
    assert (outcome.ok, outcome.meta) == (True, {"attempt": MAX_ATTEMPTS + 2})


def test_a_task_that_ends_its_workers_fails_without_a_supervisor(stack):
    hub = a_hub(stack, stall_s=600.0)
    client = a_client(stack, hub)
    submit(client, "t")
    for _ in range(MAX_ATTEMPTS):
        _, thread = a_worker(stack, hub, lambda task, progress: sys.exit(), ends_process=False)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert client.take_outcomes(0.0) == []
    a_worker(stack, hub, lambda task, progress: {})  # all of them are restarts of the same worker
    assert collect(client)["t"].reason == f"its worker died ({MAX_ATTEMPTS} attempts)"


def test_a_task_that_does_not_fit_a_message_together_with_the_note_fails_alone(stack):
    hub = a_hub(stack)
    client = a_client(stack, hub)
    hub.announce({"files": "x" * 40000}, {})
    submit(client, "t")
    submit(client, "long", [{"prompt": "y" * 40000}])
    a_worker(stack, hub, lambda task, progress: {})
    ends = {outcome.id: outcome.reason for outcome in collect(client, 2).values()}
    assert ends["t"] == ""
    assert ends["long"].startswith("cannot be sent: task: header of ")
