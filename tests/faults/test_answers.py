"""Results that are lost, late, duplicated or out of order, with real worker processes.

The client receives exactly one result per task, the correct one, and the broker frees all results.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from faults.processes import PATIENCE_S, go_on, read_lines, stop, until, wait
from faults.proxy import FaultyProxy
from transport.peers import a_client, a_hub, collect
from wfm_ds.transport import client as client_module
from wfm_ds.transport import submissions
from wfm_ds.transport.submissions import TaskRequest

WORKER = Path(__file__).parent / "lease_worker.py"
SILENT_S = 4.0  # a worker sends a message every 2 s


def a_worker(stack, endpoint, name, journal, *constants):
    """Start a worker process. It is killed at the end of the test."""
    command = [sys.executable, str(WORKER), endpoint, name, str(journal), *constants]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def left(process):
    """Ask a worker to exit by closing its stdin, and return the JSON that it prints."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return json.loads(said)


def submit(client, numbers, seconds=0.0, of=None):
    """Submit tasks that take `seconds` on the worker `of`, or on every worker if it is None."""
    until_s = time.monotonic() + 10 * PATIENCE_S
    for i in numbers:
        row = {"i": i, "seconds": seconds, "of": of}
        client.submit([row], [], [TaskRequest(f"t/{i}", "work", 0, 1, until_s)])


def test_each_task_has_one_result_despite_message_faults(stack, tmp_path, monkeypatch):
    for name in ("SINCE_INTERVAL_S", "RESUBMIT_INTERVAL_S"):
        monkeypatch.setattr(client_module, name, 0.2)
    monkeypatch.setattr(submissions, "MARKER_INTERVAL_S", 0.2)
    hub = a_hub(stack, stall_s=4.0)  # after this time a lost task is given to another worker
    near_workers = FaultyProxy(f"ipc://{stack.folder}/pw", hub.worker_endpoint, lose={"task": 20})
    stack.callback(near_workers.close)
    near_client = FaultyProxy(f"ipc://{stack.folder}/pc", hub.client_endpoint)
    stack.callback(near_client.close)
    quick = ["worker.RESEND_INTERVAL_S=0.2"]
    workers = [a_worker(stack, near_workers.endpoint, f"w{i}", tmp_path / "journal", *quick) for i in range(3)]
    client = a_client(stack, near_client.endpoint)
    count = 48
    submit(client, range(count))
    outcomes = collect(client, count)
    assert {o.id: (o.ok, o.meta) for o in outcomes.values()} == {f"t/{i}": (True, {"i": i}) for i in range(count)}
    fetched = client.fetch_results(outcomes, PATIENCE_S)
    for i in range(count):
        (tensor,) = fetched[f"t/{i}"].read_tensors()
        assert np.array_equal(tensor, np.full(i + 1, i))
    client.release_results(outcomes)
    until(lambda: not hub._spool._results)
    assert client.take_outcomes(0.5) == [], "nothing comes a second time"
    assert [left(worker) for worker in workers] == [{"unacknowledged": 0}] * 3
    assert hub.error is None
    counts = hub.request_status().result(PATIENCE_S).counts
    assert counts["submitted"] == count
    assert counts["duplicate"] > 0
    faults = near_workers.faults + near_client.faults
    for what in ("lost", "doubled", "overtook"):
        for message_type in ("task", "result", "ack", "submit", "accepted", "since", "finished", "fetch", "payload"):
            assert faults[what, message_type] > 0, (what, message_type)


# Workers without a supervisor


def begun(journal):
    """Return (worker, task) of all started tasks, in order."""
    return [(line["worker"], line["id"]) for line in read_lines(journal) if line["what"] == "begin"]


def counts(hub):
    return hub.request_status().result(PATIENCE_S).counts


def test_tasks_of_a_killed_worker_are_done_by_a_late_worker(stack, tmp_path):
    journal = tmp_path / "journal"
    hub = a_hub(stack, worker_timeout_s=SILENT_S)
    client = a_client(stack, hub)
    submit(client, range(5), seconds=1000.0, of="first")
    first = a_worker(stack, hub.worker_endpoint, "first", journal)  # the worker joins after the tasks were submitted
    until(lambda: begun(journal))
    first.kill()
    first.wait()
    a_worker(stack, hub.worker_endpoint, "second", journal)
    assert {o.id: o.meta for o in collect(client, 5).values()} == {f"t/{i}": {"i": i} for i in range(5)}
    assert sorted(begun(journal)) == [("first", "t/0"), *(("second", f"t/{i}") for i in range(5))]
    assert hub.worker_ids() == ["second"]


def test_the_late_answer_of_a_replaced_worker_is_ignored(stack, tmp_path):
    journal = tmp_path / "journal"
    hub = a_hub(stack, worker_timeout_s=SILENT_S)
    client = a_client(stack, hub)
    submit(client, [0], seconds=0.5, of="stopped")
    stopped = a_worker(stack, hub.worker_endpoint, "stopped", journal)
    until(lambda: begun(journal))
    stop(stopped.pid)
    a_worker(stack, hub.worker_endpoint, "other", journal)
    (outcome,) = collect(client, 1).values()
    assert outcome.meta == {"i": 0}
    assert begun(journal) == [("stopped", "t/0"), ("other", "t/0")]
    go_on(stopped.pid)
    until(lambda: counts(hub).get("duplicate"))
    assert client.take_outcomes(0.3) == []
    submit(client, range(1, 9), seconds=0.2)  # too many tasks for one worker, so both take some
    assert len(collect(client, 8)) == 8
    assert {worker for worker, _ in begun(journal)[2:]} == {"stopped", "other"}, "it is one of them again"


def test_the_late_answer_of_the_only_worker_counts_once(stack, tmp_path):
    journal = tmp_path / "journal"
    hub = a_hub(stack, worker_timeout_s=SILENT_S)
    client = a_client(stack, hub)
    submit(client, [0], seconds=0.5)
    worker = a_worker(stack, hub.worker_endpoint, "w", journal)
    until(lambda: begun(journal))
    stop(worker.pid)
    until(lambda: hub.worker_ids() == [])
    go_on(worker.pid)
    assert [o.meta for o in collect(client, 1).values()] == [{"i": 0}]
    assert client.take_outcomes(0.3) == []
    assert begun(journal) == [("w", "t/0")], "it is not made again"
    assert left(worker) == {"unacknowledged": 0}


def test_a_worker_asked_to_exit_returns_its_task(stack, tmp_path):
    journal = tmp_path / "journal"
    hub = a_hub(stack)
    client = a_client(stack, hub)
    submit(client, range(3), seconds=1000.0, of="leaving")
    leaving = a_worker(stack, hub.worker_endpoint, "leaving", journal)
    until(lambda: begun(journal))
    leaving.terminate()
    assert leaving.wait(PATIENCE_S) == 0
    a_worker(stack, hub.worker_endpoint, "other", journal)
    assert {o.id: o.ok for o in collect(client, 3).values()} == {f"t/{i}": True for i in range(3)}


HUB = """
import json, sys
from wfm_ds.transport import broker
folder = sys.argv[1]
kinds = {"work": broker.TaskKind(60.0, {})}
one = broker.Broker(
    clients=f"ipc://{folder}/c", workers=f"ipc://{folder}/w", kinds=kinds, worker_timeout_s=float(sys.argv[2])
)
one.start()
sys.stdin.read()
print(json.dumps(one.request_status().result(60).counts))
one.stop(0.0)
"""


def test_a_suspended_broker_does_not_drop_its_suspended_workers(stack, tmp_path):
    """The broker resumes first. Its workers have been silent for longer than the timeout but are not dropped."""
    hub = subprocess.Popen(
        [sys.executable, "-c", HUB, stack.folder, str(SILENT_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stack.callback(hub.wait)
    stack.callback(hub.kill)
    client = a_client(stack, f"ipc://{stack.folder}/c")
    journal = tmp_path / "journal"
    worker = a_worker(stack, f"ipc://{stack.folder}/w", "w", journal)
    submit(client, [0], seconds=1.0)
    until(lambda: begun(journal))
    stop(hub.pid, worker.pid)
    wait(SILENT_S + 2.0)
    go_on(hub.pid)
    wait(0.5)
    go_on(worker.pid)
    assert [o.ok for o in collect(client, 1).values()] == [True]
    assert begun(journal) == [("w", "t/0")]
    said, _ = hub.communicate(timeout=PATIENCE_S)
    assert json.loads(said) | {"released": 1} == {"submitted": 1, "done": 1, "accepted": 1, "released": 1}
