"""Answers that are lost, late, doubled and unordered, of workers that are processes: each task is done once for its
submitter, with its own result, and nothing is kept for ever."""

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from faults.proxy import FaultyProxy
from wfm_ds.pipes import client as client_module
from wfm_ds.pipes.client import PipeClient, TaskRequest
from wfm_ds.pipes.hub import Hub, Kind
from wfm_ds.pipes.sockets import private_folder

WORKER = Path(__file__).parent / "lease_worker.py"
PATIENCE_S = 60.0


@pytest.fixture
def stack():
    folder = private_folder()
    with ExitStack() as stack:
        stack.callback(folder.rmdir)
        stack.folder = folder
        yield stack


def until(condition):
    """What it returned, once that is true. Fails after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    tick = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it did not happen"
        tick.wait(0.02)
    return value


def a_hub(stack, **options):
    sockets = {"clients": f"ipc://{stack.folder}/c", "workers": f"ipc://{stack.folder}/w"}
    hub = Hub(**sockets, kinds={"work": Kind(options.pop("stall_s", PATIENCE_S), {})}, **options)
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    return hub


def a_client(stack, endpoint):
    client = PipeClient(endpoint, run="run", client="ann")
    stack.callback(client.close)
    client.attach(PATIENCE_S)
    return client


def a_worker(stack, endpoint, name, journal, *constants):
    """A process; at the end it is asked to leave, and killed if it does not."""
    command = [sys.executable, str(WORKER), endpoint, name, str(journal), *constants]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def left(process):
    """What it says when it is asked to leave."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return json.loads(said)


def submit(client, numbers, seconds=0.0, prefix="t"):
    until_s = time.monotonic() + 10 * PATIENCE_S
    for i in numbers:
        client.submit([{"i": i, "seconds": seconds}], [], [TaskRequest(f"{prefix}/{i}", "work", 0, 1, until_s)])


def collect(client, count):
    outcomes = {}
    deadline_s = time.monotonic() + PATIENCE_S
    while len(outcomes) < count:
        assert time.monotonic() < deadline_s, f"{len(outcomes)} of {count} are done"
        for outcome in client.take(0.5):
            assert outcome.id not in outcomes, "every task has one outcome"
            outcomes[outcome.id] = outcome
    return outcomes


def test_whatever_is_lost_doubled_late_or_overtaken_each_task_is_done_once(stack, tmp_path, monkeypatch):
    for name, seconds in {"SINCE_S": 0.2, "RESUBMIT_S": 0.2, "REFETCH_S": 0.2}.items():
        monkeypatch.setattr(client_module, name, seconds)
    hub = a_hub(stack, stall_s=4.0)  # then what was lost on its way is given to another
    near_workers = FaultyProxy(f"ipc://{stack.folder}/pw", hub.worker_endpoint, lose={"task": 20})
    stack.callback(near_workers.close)
    near_client = FaultyProxy(f"ipc://{stack.folder}/pc", hub.client_endpoint)
    stack.callback(near_client.close)
    quick = ["worker.RESEND_S=0.2"]
    workers = [a_worker(stack, near_workers.endpoint, f"w{i}", tmp_path / "journal", *quick) for i in range(3)]
    client = a_client(stack, near_client.endpoint)
    count = 48
    submit(client, range(count))
    outcomes = collect(client, count)
    assert {o.id: (o.ok, o.meta) for o in outcomes.values()} == {f"t/{i}": (True, {"i": i}) for i in range(count)}
    fetched = client.fetch(outcomes, PATIENCE_S)
    for i in range(count):
        (tensor,) = fetched[f"t/{i}"].tensors()
        assert np.array_equal(tensor, np.full(i + 1, i))
    client.release(outcomes)
    until(lambda: hub._spool.held_bytes == 0)
    assert client.take(0.5) == [], "nothing comes a second time"
    assert [left(worker) for worker in workers] == [{"unacknowledged": 0}] * 3
    assert hub.error is None
    counts = hub.status().result(PATIENCE_S).counts
    assert counts["submitted"] == count
    assert counts["duplicate"] > 0
    faults = near_workers.faults + near_client.faults
    for what in ("lost", "doubled", "overtook"):
        for message_type in ("task", "result", "ack", "submit", "accepted", "since", "finished", "fetch", "payload"):
            assert faults[what, message_type] > 0, (what, message_type)
