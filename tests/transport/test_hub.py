"""Hub, clients and workers over real sockets, in threads of this process. What kills processes is in tests/faults."""

import itertools
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack

import numpy as np
import pytest
import zmq

from bad_frames import bombard
from wfm_ds.transport import wire
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.messages import BROKER_TO_CLIENT, BROKER_TO_WORKER, CLIENT_TO_BROKER, WORKER_TO_BROKER
from wfm_ds.transport.pending_submissions import TaskRequest
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import Dealer, PipeError, Router, SendQueueFull, check_endpoint
from wfm_ds.transport.worker import LeaseWorker, TaskFailed

KIND = "double"
DEADLINE_S = 20.0


@pytest.fixture
def folder():
    with SocketFolder() as path:
        yield path
        assert not list(path.iterdir()), "sockets are removed"


@pytest.fixture
def stack(folder):  # unwound before the folder is looked at
    with ExitStack() as stack:
        yield stack


def a_hub(stack, folder, *, stall_s=10.0, **limits):
    hub = Broker(
        clients=f"ipc://{folder}/c", workers=f"ipc://{folder}/w", kinds={KIND: TaskKind(stall_s, {"x": 1})}, **limits
    )
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    return hub


def a_client(stack, endpoint, name="ann"):
    client = PipeClient(endpoint, run="run", client=name)
    stack.callback(client.close)
    client.attach(DEADLINE_S)
    return client


def double(task, progress):
    return {"doubled": [int(t.sum()) * 2 for t in task.read_tensors()], "rows": [row["i"] for row in task.rows]}


def a_worker(stack, hub, handle=double, name="w0"):
    worker = LeaseWorker(hub.worker_endpoint, worker=name, name=name, kinds=[KIND])
    thread = threading.Thread(target=worker.run, args=(handle,), daemon=True)
    thread.start()
    stack.callback(lambda: (worker.stop(), thread.join(DEADLINE_S)))
    return worker


def submit(client, numbers, per_task=1, prefix="t", kind=KIND):
    """One submission, a row for each number."""
    tensors = [("media", np.full((3, 5), n, np.uint8)) for n in numbers]
    ranges = [(i, min(i + per_task, len(numbers))) for i in range(0, len(numbers), per_task)]
    deadline_s = time.monotonic() + DEADLINE_S
    tasks = [TaskRequest(f"{prefix}/{i}", kind, i, j, deadline_s) for i, j in ranges]
    client.submit([{"i": i} for i in range(len(numbers))], tensors, tasks)


def collect(client, count):
    outcomes = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while len(outcomes) < count and time.monotonic() < deadline_s:
        for outcome in client.take_outcomes(0.5):
            assert outcome.id not in outcomes, "every task has one outcome"
            outcomes[outcome.id] = outcome
    return outcomes


class RawPeer:
    """A bare socket, to do what our clients and workers would not."""

    def __init__(self, stack, endpoint):
        self.context, self.mids = zmq.Context(), itertools.count(1)
        self.dealer = Dealer(self.context, endpoint)
        stack.callback(lambda: (self.dealer.close(), self.context.term()))

    def say(self, message_type, **fields):
        self.send(wire.encode_header(message_type, next(self.mids), fields))

    def send(self, header, *payload):
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self.dealer.send(header, payload)
            except SendQueueFull:  # not connected yet
                assert time.monotonic() < deadline_s
                self.dealer.socket.poll(10)

    def hear(self, message_type, timeout_s=DEADLINE_S):
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.dealer.socket.poll(50):
                message = wire.decode_message(
                    [f.buffer for f in self.dealer.receive()], BROKER_TO_WORKER | BROKER_TO_CLIENT
                )
                if message.type == message_type:
                    return message
        return None


class RawWorker(RawPeer):
    def __init__(self, stack, hub, name="raw", life="1", held=()):
        super().__init__(stack, hub.worker_endpoint)
        self.say("hello", worker=name, life=life, name=name, kinds=[KIND], credit=1, held=list(held))
        self.hear("welcome")

    def finish(self, task, meta=None):
        self.say("result", id=task["id"], attempt=task["attempt"], seconds=0.1, meta=meta or {"by": "raw"})


def test_every_task_is_done_once_and_each_worker_gets_its_rows(stack, folder):
    hub = a_hub(stack, folder)
    for i in range(2):
        a_worker(stack, hub, name=f"w{i}")
    client = a_client(stack, hub.client_endpoint)
    assert client.kinds == {KIND: {"x": 1}}
    for batch in range(10):
        submit(client, range(10), per_task=4, prefix=str(batch))
    outcomes = collect(client, 30)
    assert len(outcomes) == 30
    for (batch, start), outcome in ((o.split("/"), outcomes[o]) for o in outcomes):
        rows = list(range(int(start), min(int(start) + 4, 10)))
        assert outcome.ok, batch
        assert outcome.meta == {"doubled": [15 * 2 * i for i in rows], "rows": rows}


def test_a_result_sent_twice_counts_once(stack, folder):
    hub = a_hub(stack, folder)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [1, 2])
    for _ in range(2):
        task = raw.hear("task").fields
        raw.finish(task, {"n": 1})
        raw.finish(task, {"n": 2})
    outcomes = collect(client, 2)
    assert [o.meta for o in outcomes.values()] == [{"n": 1}, {"n": 1}]
    assert client.take_outcomes(0.3) == []


def test_an_exception_is_a_failure_of_its_task_after_three_attempts(stack, folder):
    attempts = []

    def handle(task, progress):
        attempts.append((task.id, task.attempt))
        if task.id == "t/1":
            raise ZeroDivisionError("no")
        if task.id == "t/2":
            raise TaskFailed("never", fatal=True)
        return {}

    hub = a_hub(stack, folder)
    a_worker(stack, hub, handle)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [0, 1, 2])
    outcomes = collect(client, 3)
    assert {i: (o.ok, o.reason) for i, o in outcomes.items()} == {
        "t/0": (True, ""),
        "t/1": (False, "ZeroDivisionError: no (3 attempts)"),
        "t/2": (False, "never"),
    }
    assert sorted(attempts) == [("t/0", 1), ("t/1", 1), ("t/1", 2), ("t/1", 3), ("t/2", 1)]


def test_a_result_that_no_message_can_carry_is_a_failure(stack, folder):
    hub = a_hub(stack, folder)
    a_worker(stack, hub, lambda task, progress: {"a": "x" * 40000} if task.rows[0]["i"] else {"a": object()})
    client = a_client(stack, hub.client_endpoint)
    submit(client, [0, 1])
    reasons = {o.id: o.reason for o in collect(client, 2).values()}
    assert "not a plain value" in reasons["t/0"]
    assert "limit 32768" in reasons["t/1"]


def test_a_stalled_task_moves_and_its_late_result_is_ignored(stack, folder):
    hub = a_hub(stack, folder, stall_s=0.4)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [5])
    task = raw.hear("task").fields
    assert raw.hear("stalled").fields == {"id": "t/0", "attempt": 1}
    a_worker(stack, hub)
    assert [o.meta.get("doubled") for o in collect(client, 1).values()] == [[150]]
    raw.finish(task)
    assert raw.hear("ack").fields["ids"] == ["t/0"]
    assert client.take_outcomes(0.3) == []


def test_slow_work_that_reports_progress_is_left_alone(stack, folder):
    attempts, pause = [], threading.Event()

    def handle(task, progress):
        attempts.append(task.attempt)
        for done in range(1, 9):
            pause.wait(0.3)
            progress(done, 8)
        return {}

    hub = a_hub(stack, folder, stall_s=1.5)
    a_worker(stack, hub, handle)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [1])
    assert [o.ok for o in collect(client, 1).values()] == [True]
    assert attempts == [1]


def test_what_a_lost_worker_held_is_done_by_another(stack, folder):
    hub = a_hub(stack, folder)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [5])
    assert raw.hear("task").fields["attempt"] == 1
    hub.report_lost_worker("raw", "died")
    a_worker(stack, hub)
    assert [o.ok for o in collect(client, 1).values()] == [True]
    raw.say("beat", progress=[])
    assert raw.hear("who"), "it is asked to introduce itself, should it be alive after all"


def test_a_worker_that_vanished_unnoticed_is_found_out_when_it_is_sent_a_task(stack, folder):
    hub = a_hub(stack, folder, stall_s=30.0)
    raw = RawWorker(stack, hub, name="a")  # the first in line
    raw.dealer.close()
    client = a_client(stack, hub.client_endpoint)
    submit(client, [5])
    a_worker(stack, hub)
    started = time.monotonic()
    assert [o.ok for o in collect(client, 1).values()] == [True]
    assert time.monotonic() - started < 10


def test_a_task_that_got_lost_with_a_connection_is_sent_again(stack, folder):
    hub = a_hub(stack, folder, stall_s=30.0)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [5])
    assert raw.hear("task").fields["attempt"] == 1
    again = RawWorker(stack, hub, held=[])  # the same worker on a new connection; it never saw the task
    task = again.hear("task").fields
    assert task["attempt"] == 2
    again.finish(task)
    assert [o.ok for o in collect(client, 1).values()] == [True]


def test_completions_that_got_lost_with_a_connection_are_sent_again(stack, folder):
    hub = a_hub(stack, folder)
    a_worker(stack, hub)
    task = {"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": DEADLINE_S}
    for _ in range(2):  # the second life of the connection, not of the client: its epoch is the same
        client = RawPeer(stack, hub.client_endpoint)
        client.say("attach", run="run", client="raw", epoch=1)
        client.hear("attached")
        client.say("submit", rows=[{"i": 0}], tasks=[task])
        (item,) = client.hear("finished").fields["items"]
        assert (item["id"], item["seq"], item["ok"]) == ("t", 1, True)
        client.dealer.close()


def test_a_completion_that_comes_twice_is_one_outcome(stack, folder):
    context = zmq.Context()
    router = Router(context, f"ipc://{folder}/c")
    stack.callback(lambda: (router.close(), context.term(), router.remove_files()))
    client = PipeClient(router.endpoint, run="run", client="ann")
    stack.callback(client.close)
    submit(client, [1])
    answers = {
        "attach": [("attached", {"session": "1", "kinds": {}})],
        "submit": [("accepted", {"ids": ["t/0"], "known": [], "refused": []})],
    }
    done = {"seq": 1, "id": "t/0", "ok": True, "worker": "w", "attempt": 1, "seconds": 0.0, "meta": {}, "reason": ""}
    answers["submit"] += [("finished", {"after": 0, "items": [done]})] * 3
    seen = set()
    while "submit" not in seen:
        assert router.socket.poll(DEADLINE_S * 1000), "the client attaches, then submits"
        route, frames = router.receive()
        message = wire.decode_message([f.buffer for f in frames], CLIENT_TO_BROKER)
        seen.add(message.type)
        router.send(route, b"rubbish")
        for message_type, fields in answers.get(message.type, []):
            router.send(route, wire.encode_header(message_type, 1, fields))
    assert [o.id for o in client.take_outcomes(DEADLINE_S)] == ["t/0"]
    assert client.take_outcomes(0.3) == []


def test_a_worker_says_of_a_lease_whose_task_never_reached_it_that_it_has_it_not(stack, folder):
    """Else the hub would keep its place for it, and never give it another."""
    context = zmq.Context()
    router = Router(context, f"ipc://{folder}/w")
    stack.callback(lambda: (router.close(), context.term(), router.remove_files()))
    worker = LeaseWorker(router.endpoint, worker="w", name="w", kinds=[KIND])
    thread = threading.Thread(target=worker.run, args=(double,), daemon=True)
    thread.start()
    stack.callback(lambda: (worker.stop(), thread.join(DEADLINE_S)))

    def hear(message_type):
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline_s, message_type
            assert router.socket.poll(DEADLINE_S * 1000), message_type
            route, frames = router.receive()
            message = wire.decode_message([f.buffer for f in frames], WORKER_TO_BROKER)
            if message.type == message_type:
                return route, message.fields

    route, _ = hear("hello")
    router.send(route, wire.encode_header("welcome", 1, {"hub": "1", "beat_s": 2.0}))
    router.send(route, wire.encode_header("stalled", 2, {"id": "t", "attempt": 7}))
    _, failed = hear("failed")
    assert (failed["id"], failed["attempt"], failed["reason"]) == ("t", 7, "not received")


def test_a_new_hub_gets_everything_unfinished_again(stack, folder):
    done, gate = [], threading.Event()

    def handle(task, progress):
        if len(done) == 3:
            gate.wait(DEADLINE_S)
        done.append(task.id)
        return {"i": task.rows[0]["i"]}

    first = a_hub(stack, folder)
    a_worker(stack, first, handle)
    client = a_client(stack, first.client_endpoint)
    submit(client, range(8))
    early = collect(client, 3)
    first.stop(0.0)
    submit(client, range(4), prefix="later")
    second = a_hub(stack, folder)
    gate.set()
    rest = collect(client, 9)
    assert not early.keys() & rest.keys()
    assert {o.id: o.meta["i"] for o in (early | rest).values()} == (
        {f"t/{i}": i for i in range(8)} | {f"later/{i}": i for i in range(4)}
    )
    assert second.error is None
    assert client.silence_s() < 3


def test_a_full_hub_is_offered_the_rest_later(stack, folder):
    hub = a_hub(stack, folder, max_bytes=40)
    a_worker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, range(6))
    assert all(o.ok for o in collect(client, 6).values())
    submit(client, range(6), per_task=6, prefix="big")
    assert [o.reason for o in collect(client, 1).values()] == ["rejected: task too large: 90 bytes, limit 40"]


def test_what_fits_a_first_message_alone_is_refused_at_once(stack, folder):
    """The number of a message takes more bytes the more were sent before."""
    client = a_client(stack, a_hub(stack, folder).client_endpoint)
    task = TaskRequest("t", KIND, 0, 1, client.now_s() + DEADLINE_S)
    fields = {"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": 1.0}
    text = "x" * 65000
    spare = wire.MAX_HEADER_BYTES - len(wire.encode_header("submit", 0, {"rows": [{"i": text}], "tasks": [fields]}))
    fits_once = {"i": text + "x" * spare}
    wire.encode_header("submit", 0, {"rows": [fits_once], "tasks": [fields]})
    with pytest.raises(wire.WireError, match="header of"):
        client.submit([fits_once], [], [task])


def test_an_unknown_kind_is_refused_by_name(stack, folder):
    client = a_client(stack, a_hub(stack, folder).client_endpoint)
    submit(client, [1], kind="triple")
    assert [o.reason for o in collect(client, 1).values()] == ["rejected: unknown task kind triple; available: double"]


def test_a_cancelled_task_has_no_outcome(stack, folder):
    hub = a_hub(stack, folder)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    submit(client, [1, 2])
    task = raw.hear("task").fields
    client.cancel(["t/0", "unknown"])
    assert raw.hear("cancel").fields["ids"] == ["t/0"]
    raw.finish(task)
    raw.finish(raw.hear("task").fields)
    assert list(collect(client, 1)) == ["t/1"]


def test_a_newer_client_of_the_same_name_replaces_the_older(stack, folder):
    hub = a_hub(stack, folder)
    older = a_client(stack, hub.client_endpoint)
    submit(older, [1])
    newer = a_client(stack, hub.client_endpoint)
    submit(newer, [2])
    a_worker(stack, hub)
    assert [o.meta["doubled"] for o in collect(newer, 1).values()] == [[60]]
    assert older.take_outcomes(0.3) == []


def test_an_older_client_does_not_take_back_its_name(stack, folder):
    hub = a_hub(stack, folder)
    peers = {}
    for epoch in (1, 2):
        peers[epoch] = RawPeer(stack, hub.client_endpoint)
        peers[epoch].say("attach", run="run", client="ann", epoch=epoch)
        assert peers[epoch].hear("attached")
    peers[1].say("attach", run="run", client="ann", epoch=1)
    assert peers[1].hear("reject").fields["why"] == "a newer client run/ann is attached"
    peers[2].say("since", seq=0)
    assert peers[2].hear("finished"), "it is still the one"


def test_rubbish_disturbs_nobody(stack, folder):
    hub = Broker(clients="tcp://127.0.0.1:0", workers=f"ipc://{folder}/w", kinds={KIND: TaskKind(10.0, {})})
    hub.start()
    stack.callback(lambda: hub.stop(0.0))
    a_worker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    port = int(hub.client_endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    context = zmq.Context()
    peer = Dealer(context, hub.client_endpoint)
    deadline_s = time.monotonic() + DEADLINE_S
    sent = 0
    while sent < 20 and time.monotonic() < deadline_s:
        try:
            peer.send(os.urandom(50), [b"x"] * sent)
            sent += 1
        except SendQueueFull:
            peer.socket.poll(10)
    submit(client, [1])
    assert [o.ok for o in collect(client, 1).values()] == [True]
    while sum(hub.rejected.values()) < 20 and time.monotonic() < deadline_s:
        peer.socket.poll(20)
        peer.receive()
    assert sum(hub.rejected.values()) == 20
    assert hub.error is None
    peer.close()
    context.term()


def test_a_flood_of_bad_messages_is_one_line(stack, folder, caplog):
    hub = a_hub(stack, folder)
    peer = RawPeer(stack, hub.client_endpoint)
    for i in range(400):
        peer.send(os.urandom(50 + i))
        assert peer.hear("reject")
    assert hub.rejected.total() == 400
    assert sum("dropped a message" in record.getMessage() for record in caplog.records) <= 1


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_workers_messages_drawn_from_a_seed_are_answered_or_rejected(stack, folder, count):
    hub = a_hub(stack, folder)
    a_worker(stack, hub)
    client = a_client(stack, hub.client_endpoint)
    told, invalid = bombard(hub.worker_endpoint, count, seed=count, workers=True)
    assert invalid > count / 2
    assert hub.rejected.total() == told["reject"] >= invalid
    submit(client, [1, 2, 3])
    assert all(outcome.ok for outcome in collect(client, 3).values())
    assert hub.error is None


def test_failures_of_tasks_that_a_worker_does_not_have_are_not_logged(stack, folder, caplog):
    hub = a_hub(stack, folder)
    worker = RawWorker(stack, hub)
    for i in range(50):
        worker.say("failed", id=f"nothing {i}", attempt=1, reason="no", detail="x" * 1000, fatal=False)
        assert worker.hear("ack")
    assert not [record for record in caplog.records if "failed on" in record.getMessage()]


def test_nobody_answering_is_an_error_that_says_where(stack, tmp_path):
    for endpoint, says in [("ipc:///tmp/wfm-nobody", "nothing listens"), (str(tmp_path / "pipes.json"), "not exist")]:
        client = PipeClient(endpoint, run="run", client="ann")
        stack.callback(client.close)
        with pytest.raises(PipeError, match=f"no reply within 0.4 s: .*{says}"):
            client.attach(0.4)


def test_a_pipes_json_that_is_none_is_named(stack, tmp_path):
    for content in ("{", "[]", '{"clients": 3}', json.dumps({"clients": "tcp://example.org:5"})):
        (tmp_path / "pipes.json").write_text(content)
        client = PipeClient(str(tmp_path / "pipes.json"), run="run", client="ann")
        stack.callback(client.close)
        with pytest.raises(PipeError, match=r"cannot be read|has no address|only ipc"):
            client.attach(0.3)


@pytest.mark.parametrize("endpoint", ["ipc:///run/x", "tcp://127.0.0.1:5", "tcp://localhost:*", "tcp://[::1]:0"])
def test_local_endpoints_are_allowed(endpoint):
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5",
        "tcp://*:5",
        "tcp://10.0.0.5:6100",
        "tcp://example.org:5",
        "tcp://127.0.0.1",
        "tcp://[::]:5",
        "ipc://relative",
        f"ipc:///{'x' * 107}",
        "inproc://x",
        "udp://127.0.0.1:5",
        "",
    ],
)
def test_other_endpoints_are_refused(endpoint):
    with pytest.raises(PipeError):
        check_endpoint(endpoint)


def test_one_path_is_bound_once_and_a_stale_one_again(stack, folder):
    a_hub(stack, folder)
    with pytest.raises(PipeError, match="another process already does"):
        Broker(clients=f"ipc://{folder}/c", workers=f"ipc://{folder}/w2", kinds={})
    with pytest.raises(PipeError, match=r"cannot listen at .*no-such"):
        Broker(clients=f"ipc://{folder}/no-such/c", workers=f"ipc://{folder}/w2", kinds={})
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{folder}/s")  # closing leaves the path, as a killed process does
    hub = Broker(clients=f"ipc://{folder}/s", workers=f"ipc://{folder}/s2", kinds={})
    hub.start()
    hub.stop(0.0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_hub_that_stops_waits_until_its_client_has_what_finished(stack, folder):
    hub = a_hub(stack, folder)
    a_worker(stack, hub)
    client = RawPeer(stack, hub.client_endpoint)
    client.say("attach", run="run", client="raw", epoch=1)
    assert client.hear("attached")
    rows = [{"i": 0}]
    client.say("submit", rows=rows, tasks=[{"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": 60.0}])
    finished = client.hear("finished").fields["items"]
    stopping = threading.Thread(target=hub.stop, args=(DEADLINE_S,), daemon=True)
    stopping.start()
    stopping.join(1.0)
    assert stopping.is_alive(), "sent is not received"
    client.say("since", seq=finished[-1]["seq"])
    stopping.join(DEADLINE_S / 2)
    assert not stopping.is_alive()


def test_a_hub_that_stops_answers_every_question_or_cancels_it(stack, folder, monkeypatch):
    hub = a_hub(stack, folder)
    assert hub.request_status().result(DEADLINE_S).counts == {}
    asked = []
    close = Router.close

    def ask_and_close(router):
        asked.append(hub.request_status())
        close(router)

    monkeypatch.setattr(Router, "close", ask_and_close)  # its thread closes, and is still alive
    hub._commands.put(
        lambda: (hub._start_drain(0.0), asked.append(hub.request_status()))
    )  # is in the mailbox when it closes
    hub.stop(0.0)
    asked.append(hub.request_status())
    assert len(asked) == 4
    for answer in asked:
        with pytest.raises(CancelledError):
            answer.result(DEADLINE_S)


def test_pipes_load_nothing_heavy():
    code = (
        "import wfm_ds.transport.broker, wfm_ds.transport.client, wfm_ds.transport.worker, sys;"
        "roots = {m.split('.')[0] for m in sys.modules};"
        "print(sorted(roots & {'torch', 'deepspeed', 'diffusers', 'yaml'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
