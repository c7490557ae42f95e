"""Which worker processes with a stalled task are killed; tests/faults/test_reward_service.py has real hangs."""

import queue
import selectors
import time
from contextlib import ExitStack

import pytest

from faults.processes import until
from transport.peers import RawPeer, a_client, submit
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_reward import worker_pool

KIND = "score:quiet"
PATIENCE_S = 30.0


@pytest.fixture
def stack(monkeypatch):
    monkeypatch.setattr(worker_pool, "STALL_GRACE_S", 0.3)
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def stalls():
    return queue.SimpleQueue()


@pytest.fixture
def hub(stack, stalls):
    folder = stack.enter_context(SocketFolder())
    sockets = {"clients": f"ipc://{folder}/c", "workers": f"ipc://{folder}/w"}
    hub = Broker(**sockets, kinds={KIND: TaskKind(0.5, {})}, on_stall=stalls.put)
    hub.start()
    stack.callback(hub.stop, 0.0)
    return hub


@pytest.fixture
def pool(stack, hub):
    program = worker_pool.WorkerProgram("reward quiet", KIND, "quiet_worker", {}, "cpu", 1)
    selector = stack.enter_context(selectors.DefaultSelector())
    pool = worker_pool.WorkerPool(hub, {"quiet": program}, selector, has_been_ready=True)
    stack.callback(pool.stop)
    pool.supervise(time.monotonic())
    return pool


@pytest.fixture
def voice(stack, hub, pool, stalls):
    """Return a peer that sends messages in the name of a worker whose task has just stalled."""
    submit(a_client(stack, hub), "t", kind=KIND)
    worker = pool.worker_states()[0].worker_id
    voice = RawPeer(stack, hub.worker_endpoint)
    voice.say("hello", worker=worker, life=worker, name="quiet", kinds=[KIND], credit=1, held=[])
    assert voice.hear("stalled") == {"id": "t", "attempt": 1}
    pool.watch_stalled_worker(stalls.get(timeout=PATIENCE_S), time.monotonic())
    return voice


def supervised(pool):
    pool.supervise(time.monotonic())
    return pool


def test_a_worker_that_never_received_its_task_is_not_killed(pool, voice):
    before = pool.worker_states()
    voice.say("failed", id="t", attempt=1, reason="it did not arrive", detail="", fatal=False)
    assert voice.hear("task")["attempt"] == 2
    voice.say("result", id="t", attempt=2, seconds=0.1, meta={})
    assert voice.hear("ack") == {"ids": ["t"]}
    until(lambda: supervised(pool).next_action_s(0.0) == float("inf"))
    assert pool.worker_states() == before


def test_a_worker_that_keeps_its_task_and_says_nothing_is_killed(pool, voice):
    pid = pool.worker_states()[0].pid
    assert pid is not None
    until(lambda: supervised(pool).worker_states()[0].pid != pid)
