"""A worker against a hub of bare messages: which attempt at a task it speaks of."""

import threading
import time
from contextlib import ExitStack

import pytest
import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.messages import WORKER_TO_BROKER
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import Router
from wfm_ds.transport.worker import LeaseWorker

KIND = "work"
DEADLINE_S = 20.0


class RawHub:
    """Says what a test makes it say."""

    def __init__(self, stack):
        folder, context = stack.enter_context(SocketFolder()), zmq.Context()
        self.router = Router(context, f"ipc://{folder}/w")
        for closing in (self.router.remove_files, context.term, self.router.close):
            stack.callback(closing)
        self.route = b""

    def hear(self, message_type):
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if self.router.socket.poll(50):
                self.route, frames = self.router.receive()
                message = wire.decode_message([f.buffer for f in frames], WORKER_TO_BROKER)
                if message.type == message_type:
                    return message.fields
        raise AssertionError(f"no {message_type} within {DEADLINE_S:g} s")

    def hear_mark(self, *mark):
        deadline_s = time.monotonic() + DEADLINE_S
        while self.hear("beat")["progress"] != [list(mark)]:
            assert time.monotonic() < deadline_s, f"no mark {mark}"

    def say(self, message_type, **fields):
        self.router.send(self.route, wire.encode_header(message_type, 1, fields))

    def lease(self, task_id, attempt):
        self.say("task", id=task_id, attempt=attempt, kind=KIND, rows=[{}], note={})


class Steps:
    """A handle whose test says when it goes on."""

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


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hub(stack):
    return RawHub(stack)


@pytest.fixture
def steps(stack, hub):
    steps = Steps()
    worker = LeaseWorker(hub.router.endpoint, worker="w", name="w", kinds=[KIND], credit=2, ends_process=False)
    thread = threading.Thread(target=worker.run, args=[steps], daemon=True)
    thread.start()
    stack.callback(lambda: (steps.go_on.release(100), worker.stop(), thread.join(DEADLINE_S)))
    hub.hear("hello")
    hub.say("welcome", hub="1", beat_s=0.05)
    return steps


@pytest.mark.parametrize(("task_id", "ends_as"), [("works", "result"), ("fails", "failed")])
def test_a_task_that_is_leased_again_while_it_runs_is_reported_under_its_new_lease(hub, steps, task_id, ends_as):
    hub.lease(task_id, 1)
    hub.hear_mark(task_id, 1, 1, 2)
    hub.lease(task_id, 3)  # the hub had lost the worker for a while
    steps.go_on.release()
    hub.hear_mark(task_id, 3, 2, 2)
    steps.go_on.release()
    assert hub.hear(ends_as)["attempt"] == 3
    assert steps.began == [(task_id, 1)], "it is not done twice"


def test_a_task_that_was_given_back_and_leased_again_is_done_as_the_newer(hub, steps):
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
