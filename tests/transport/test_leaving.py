"""A worker's end and the task that it had: a goodbye is no attempt, a death is one."""

import sys
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.ledger import MAX_ATTEMPTS
from wfm_ds.transport.pending_submissions import TaskRequest
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.worker import LeaseWorker

KIND = "work"
DEADLINE_S = 20.0


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hub(stack):
    folder = stack.enter_context(SocketFolder())
    hub = Broker(clients=f"ipc://{folder}/c", workers=f"ipc://{folder}/w", kinds={KIND: TaskKind(600.0, {})})
    hub.start()
    stack.callback(hub.stop, 0.0)
    return hub


@pytest.fixture
def client(stack, hub):
    client = PipeClient(hub.client_endpoint, run="run", client="ann")
    stack.callback(client.close)
    client.attach(DEADLINE_S)
    client.submit([{}], [], [TaskRequest("t", KIND, 0, 1, time.monotonic() + 600)])
    return client


def a_worker(stack, hub, handle, name):
    worker = LeaseWorker(hub.worker_endpoint, worker=name, name=name, kinds=[KIND], ends_process=False)

    def run():
        with suppress(SystemExit):
            worker.run(handle)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    stack.callback(lambda: (worker.stop(), thread.join(DEADLINE_S)))
    return worker, thread


def test_workers_that_leave_in_the_middle_of_a_task_are_not_its_attempts(stack, hub, client):
    released = threading.Event()
    for name in range(MAX_ATTEMPTS + 1):
        at_work = threading.Event()

        def endless(task, progress, at_work=at_work):
            at_work.set()
            released.wait(DEADLINE_S)  # beyond it the test has failed
            return {}

        worker, _ = a_worker(stack, hub, endless, f"w{name}")
        assert at_work.wait(DEADLINE_S)
        worker.stop()
        assert worker.disconnected.wait(DEADLINE_S), "it does not wait for its task"
    a_worker(stack, hub, lambda task, progress: {"attempt": task.attempt}, "patient")
    (outcome,) = client.take_outcomes(DEADLINE_S)
    released.set()
    assert (outcome.ok, outcome.meta) == (True, {"attempt": MAX_ATTEMPTS + 2})


def test_a_task_that_ends_its_worker_is_given_up_although_nobody_watches_the_process(stack, hub, client):
    for _ in range(MAX_ATTEMPTS):
        _, thread = a_worker(stack, hub, lambda task, progress: sys.exit(), "w")
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert client.take_outcomes(0.0) == []
    a_worker(stack, hub, lambda task, progress: {}, "w")  # each is another life of the same worker
    (outcome,) = client.take_outcomes(DEADLINE_S)
    assert (outcome.ok, outcome.reason) == (False, f"its worker died ({MAX_ATTEMPTS} attempts)")


def test_a_task_that_does_not_fit_a_message_together_with_the_note_fails_alone(stack, hub, client):
    hub.announce({"files": "x" * 40000}, {})
    client.submit([{"prompt": "y" * 40000}], [], [TaskRequest("long", KIND, 0, 1, client.now_s() + 600)])
    a_worker(stack, hub, lambda task, progress: {}, "w")
    ends = {}
    while len(ends) < 2 and (outcomes := client.take_outcomes(DEADLINE_S)):
        ends |= {outcome.id: outcome.reason for outcome in outcomes}
    assert ends["t"] == ""
    assert ends["long"].startswith("cannot be sent: task: header of ")
