"""Broker, clients and workers over real sockets, in threads of this process; tests/faults kills processes."""

import socket
import stat
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from bad_frames import bombard
from faults.processes import until
from transport.peers import DEADLINE_S, KIND, RawHub, RawPeer, RawWorker, a_client, a_hub, a_worker, collect, submit
from wfm_ds.transport import wire
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.sockets import MessagePort, PipeError, check_endpoint
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.transport.worker import TaskFailed


def double(task, progress):
    return {"doubled": [int(t.sum()) * 2 for t in task.read_tensors()], "rows": [row["i"] for row in task.rows]}


def submit_each(client, numbers, prefix="t"):
    """Submit all numbers in one submission with one task per number."""
    tensors = [("media", np.full((3, 5), n, np.uint8)) for n in numbers]
    tasks = [TaskRequest(f"{prefix}/{i}", KIND, i, i + 1, client.now_s() + DEADLINE_S) for i in range(len(numbers))]
    client.submit([{"i": i} for i in range(len(numbers))], tensors, tasks)


def test_every_task_is_done_once_with_its_rows(stack):
    hub = a_hub(stack)
    for i in range(2):
        a_worker(stack, hub, double, f"w{i}")
    client = a_client(stack, hub)
    assert client.kinds == {KIND: {"x": 1}}
    for batch in range(10):
        tensors = [("media", np.full((3, 5), n, np.uint8)) for n in range(10)]
        ranges = [(0, 4), (4, 8), (8, 10)]
        tasks = [TaskRequest(f"{batch}/{i}", KIND, i, j, client.now_s() + DEADLINE_S) for i, j in ranges]
        client.submit([{"i": i} for i in range(10)], tensors, tasks)
    for task_id, outcome in collect(client, 30).items():
        start = int(task_id.split("/")[1])
        rows = list(range(start, min(start + 4, 10)))
        assert outcome.ok
        assert outcome.meta == {"doubled": [15 * 2 * i for i in rows], "rows": rows}


def test_exceptions_and_results_that_no_message_can_carry_are_failures_of_their_tasks(stack):
    attempts, results = [], {"a": {}, "large": {"a": "x" * 40000}, "odd": {"a": object()}, "no map": 3}

    def handle(task, progress):
        attempts.append((task.id, task.attempt))
        if task.id == "raises":
            raise ZeroDivisionError("no")
        if task.id == "fatal":
            raise TaskFailed("never", fatal=True)
        return results[task.id]

    hub = a_hub(stack)
    a_worker(stack, hub, handle)
    client = a_client(stack, hub)
    for task_id in (*results, "raises", "fatal"):
        submit(client, task_id)
    reasons = {o.id: o.reason for o in collect(client, 6).values()}
    assert "limit 32768" in reasons.pop("large")
    assert "not a plain value" in reasons.pop("odd")
    assert reasons == {
        "a": "",
        "no map": "returned int instead of a map",
        "raises": "ZeroDivisionError: no (3 attempts)",
        "fatal": "never",
    }
    assert [attempt for task_id, attempt in attempts if task_id == "raises"] == [1, 2, 3]


def test_a_stalled_task_moves_and_its_late_result_is_ignored(stack):
    hub = a_hub(stack, stall_s=0.4)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub)
    submit_each(client, [5])
    task = raw.hear("task")
    assert raw.hear("stalled") == {"id": "t/0", "attempt": 1}
    a_worker(stack, hub, double)
    assert collect(client)["t/0"].meta["doubled"] == [150]
    raw.finish(task)
    assert raw.hear("ack")["ids"] == ["t/0"]
    assert client.take_outcomes(0.3) == []


def test_slow_work_that_reports_progress_is_left_alone(stack):
    attempts, pause = [], threading.Event()

    def handle(task, progress):
        attempts.append(task.attempt)
        for done in range(1, 9):
            pause.wait(0.3)
            progress(done, 8)
        return {}

    hub = a_hub(stack, stall_s=1.5)
    a_worker(stack, hub, handle)
    client = a_client(stack, hub)
    submit(client, "t")
    assert collect(client)["t"].ok
    assert attempts == [1]


def test_tasks_of_a_lost_worker_are_done_by_another(stack):
    hub = a_hub(stack)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub)
    submit_each(client, [5])
    assert raw.hear("task")["attempt"] == 1
    hub.report_lost_worker("raw", "died")
    a_worker(stack, hub, double)
    assert collect(client)["t/0"].ok
    raw.say("beat", progress=[])
    raw.hear("who")  # it must introduce itself if it is still alive


def test_a_vanished_worker_is_detected_when_it_is_sent_a_task(stack):
    hub = a_hub(stack)
    raw = RawWorker(stack, hub, name="a")  # the first to get a task
    raw.dealer.close()
    client = a_client(stack, hub)
    submit_each(client, [5])
    a_worker(stack, hub, double)
    started = time.monotonic()
    assert collect(client)["t/0"].ok
    assert time.monotonic() - started < 10


def test_messages_lost_with_a_connection_are_sent_again(stack):
    hub = a_hub(stack)
    raw = RawWorker(stack, hub)
    task = {"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": DEADLINE_S}
    for life in range(2):  # the connection is new, the client is the same: equal epochs
        client = RawPeer(stack, hub.client_endpoint)
        client.say("attach", run="run", client="raw", epoch=1)
        client.hear("attached")
        client.say("submit", rows=[{"i": 0}], tasks=[task])
        if life == 0:
            assert raw.hear("task")["attempt"] == 1
            again = RawWorker(stack, hub, held=[])  # same worker, new connection; it never received the task
            leased = again.hear("task")
            assert leased["attempt"] == 2
            again.finish(leased)
        (item,) = client.hear("finished")["items"]
        assert (item["id"], item["seq"], item["ok"]) == ("t", 1, True)
        client.dealer.close()


def test_a_repeated_completion_is_one_outcome_and_an_invalid_one_is_none(stack):
    hub = RawHub(stack)
    client = PipeClient(hub.endpoint, run="run", client="ann")
    stack.callback(client.close)
    submit(client, "t")
    hub.hear("attach")
    hub.socket.send_multipart([hub.route, b"rubbish"])
    hub.say("attached", session="1", kinds={})
    hub.hear("submit")
    hub.say("accepted", ids=["t"], known=[], refused=[])
    done = {"seq": 1, "id": "t", "ok": True, "worker": "w", "attempt": 1, "seconds": 0.0, "meta": {}, "reason": ""}
    for _ in range(3):
        hub.say("finished", after=0, items=[done])
    assert [o.id for o in client.take_outcomes(DEADLINE_S)] == ["t"]
    assert client.take_outcomes(0.3) == []


def test_a_new_broker_gets_all_unfinished_tasks_again(stack):
    done, gate = [], threading.Event()

    def handle(task, progress):
        if len(done) == 3:
            gate.wait(DEADLINE_S)
        done.append(task.id)
        return {"i": task.rows[0]["i"]}

    first = a_hub(stack)
    a_worker(stack, first, handle)
    client = a_client(stack, first)
    submit_each(client, range(8))
    early = collect(client, 3)
    first.stop(0.0)
    submit_each(client, range(4), prefix="later")
    second = a_hub(stack)
    gate.set()
    rest = collect(client, 9)
    assert not early.keys() & rest.keys()
    assert {o.id: o.meta["i"] for o in (early | rest).values()} == (
        {f"t/{i}": i for i in range(8)} | {f"later/{i}": i for i in range(4)}
    )
    assert second.error is None
    assert client.silence_s < 3


def test_tasks_above_the_limit_wait_or_are_refused(stack):
    hub = a_hub(stack, max_bytes=40)
    a_worker(stack, hub, double)
    client = a_client(stack, hub)
    submit_each(client, range(6))  # 90 bytes: the client offers the rest later
    assert all(outcome.ok for outcome in collect(client, 6).values())
    submit(client, "big", [{"i": i} for i in range(6)], [np.zeros((3, 5), np.uint8)] * 6)
    assert collect(client)["big"].reason == "rejected: task too large: 90 bytes, limit 40"
    submit(client, "odd", kind="triple")
    assert collect(client)["odd"].reason == "rejected: unknown task kind triple; available: work"
    with pytest.raises(wire.WireError, match="65 rows, 1 tasks; limits: 64, 1024"):
        submit(client, "rows", [{}] * 65)
    # Later messages have longer numbers, so a header that fits only as the first message is rejected.
    fields = {"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": 1.0}
    text = "x" * 65000
    spare = wire.MAX_HEADER_BYTES - len(wire.encode_header("submit", 0, {"rows": [{"i": text}], "tasks": [fields]}))
    fits_once = {"i": text + "x" * spare}
    wire.encode_header("submit", 0, {"rows": [fits_once], "tasks": [fields]})
    with pytest.raises(wire.WireError, match="header of"):
        submit(client, "t", [fits_once])


def test_a_cancelled_task_has_no_outcome(stack):
    hub = a_hub(stack)
    raw = RawWorker(stack, hub)
    client = a_client(stack, hub)
    submit_each(client, [1, 2])
    task = raw.hear("task")
    client.cancel(["t/0", "unknown"])
    assert raw.hear("cancel")["ids"] == ["t/0"]
    raw.finish(task)
    raw.finish(raw.hear("task"))
    assert list(collect(client)) == ["t/1"]


def test_a_newer_client_of_the_same_name_replaces_the_older(stack):
    hub = a_hub(stack)
    older = a_client(stack, hub)
    submit_each(older, [1])
    newer = a_client(stack, hub)
    submit_each(newer, [2])
    a_worker(stack, hub, double)
    assert collect(newer)["t/0"].meta["doubled"] == [60]
    peers = {}
    for epoch in (2**62, 2**62 + 1):
        peers[epoch] = RawPeer(stack, hub.client_endpoint)
        peers[epoch].say("attach", run="run", client="ann", epoch=epoch)
        peers[epoch].hear("attached")
    peers[2**62].say("attach", run="run", client="ann", epoch=2**62)
    assert peers[2**62].hear("reject")["why"] == "a newer client run/ann is attached"
    peers[2**62 + 1].say("since", seq=0)
    peers[2**62 + 1].hear("finished")  # the newer client stays attached


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_random_messages_of_workers_are_answered_or_rejected(stack, count):
    hub = a_hub(stack)
    a_worker(stack, hub, double)
    client = a_client(stack, hub)
    told, invalid = bombard(hub.worker_endpoint, count, seed=count, workers=True)
    assert invalid > count / 2
    assert hub.rejected.total() == told["reject"] >= invalid
    submit_each(client, [1, 2, 3])
    assert all(outcome.ok for outcome in collect(client, 3).values())
    assert hub.error is None


def test_failures_of_tasks_that_a_worker_does_not_have_are_not_logged(stack, caplog):
    hub = a_hub(stack)
    worker = RawWorker(stack, hub)
    for i in range(50):
        worker.say("failed", id=f"nothing {i}", attempt=1, reason="no", detail="x" * 1000, fatal=False)
        worker.hear("ack")
    assert not [record for record in caplog.records if "failed on" in record.getMessage()]


def test_an_unreachable_broker_is_an_error_with_its_address(stack, tmp_path):
    pipes, contents = tmp_path / "pipes.json", ("{", "[" * 100_000, "[]", '{"clients": 3}')
    contents = (*contents, '{"clients": "tcp://example.org:5"}')
    for content in (None, *contents):
        if content is not None:
            pipes.write_text(content)
        says = "does not exist" if content is None else r"cannot be read|has no address|needs keys"
        with pytest.raises(PipeError, match=says):
            a_client(stack, str(pipes), attach=False).attach(0.3)
    with pytest.raises(PipeError, match=r"no reply within 0.4 s: .*nothing listens"):
        a_client(stack, "ipc:///tmp/wfm-nobody", attach=False).attach(0.4)


def test_endpoints_are_ipc_unless_there_are_keys():
    assert check_endpoint("ipc:///run/x") == "ipc:///run/x"
    for endpoint in ("tcp://127.0.0.1:5", "tcp://localhost:*", "tcp://10.0.0.5:6100", "tcp://[::1]:0", "ipc:///x"):
        if endpoint.startswith("tcp"):
            with pytest.raises(PipeError, match="needs keys"):
                check_endpoint(endpoint)
        assert check_endpoint(endpoint, keys=True) == endpoint
    for endpoint in ("tcp://0.0.0.0:5", "tcp://*:5", "tcp://[::]:5"):
        with pytest.raises(PipeError, match="use one address of this machine"):
            check_endpoint(endpoint, keys=True)
    for endpoint in (
        *("tcp://127.0.0.1", "", "ipc://relative", f"ipc:///{'x' * 107}", "inproc://x", "udp://127.0.0.1:5"),
    ):
        with pytest.raises(PipeError, match=r"is not an endpoint|an ipc path must be"):
            check_endpoint(endpoint, keys=True)


def test_a_path_is_bound_once_and_a_stale_one_is_reused(stack):
    a_hub(stack)
    with pytest.raises(PipeError, match="another process already does"):
        Broker(clients=f"ipc://{stack.folder}/c", workers=f"ipc://{stack.folder}/w2", kinds={})
    with pytest.raises(PipeError, match=r"cannot listen at .*no-such"):
        Broker(clients=f"ipc://{stack.folder}/no-such/c", workers=f"ipc://{stack.folder}/w2", kinds={})
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{stack.folder}/s")  # closing leaves the socket file, like a killed process
    hub = Broker(clients=f"ipc://{stack.folder}/s", workers=f"ipc://{stack.folder}/s2", kinds={})
    hub.start()
    hub.stop(0.0)
    assert stat.S_IMODE(stack.folder.stat().st_mode) == 0o700


def test_a_stopping_broker_waits_until_its_client_has_all_results(stack):
    hub = a_hub(stack)
    a_worker(stack, hub, lambda task, progress: {})
    client = RawPeer(stack, hub.client_endpoint)
    client.say("attach", run="run", client="raw", epoch=1)
    client.hear("attached")
    task = {"id": "t", "kind": KIND, "start": 0, "stop": 1, "deadline_s": 60.0}
    client.say("submit", rows=[{"i": 0}], tasks=[task])
    finished = client.hear("finished")["items"]
    stopping = threading.Thread(target=hub.stop, args=(DEADLINE_S,), daemon=True)
    stopping.start()
    stopping.join(1.0)
    assert stopping.is_alive(), "sent is not received"
    client.say("since", seq=finished[-1]["seq"])
    until(lambda: not stopping.is_alive())


def test_a_stopping_broker_answers_or_cancels_every_request(stack, monkeypatch):
    hub = a_hub(stack)
    assert hub.request_status().result(DEADLINE_S).counts == {}
    asked = []
    close = MessagePort.close

    def ask_and_close(router):
        asked.append(hub.request_status())
        close(router)

    monkeypatch.setattr(MessagePort, "close", ask_and_close)  # a request while the broker's thread is closing
    # This request is in the mailbox when the broker closes.
    hub._commands.put(lambda: (hub._start_drain(0.0), asked.append(hub.request_status())))
    hub.stop(0.0)
    asked.append(hub.request_status())
    assert len(asked) == 4
    for answer in asked:
        with pytest.raises(CancelledError):
            answer.result(DEADLINE_S)
