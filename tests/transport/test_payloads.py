"""Results with tensors, announced files and notes, and silent workers, over real sockets."""

import threading

import numpy as np
import pytest

from faults.processes import until
from transport.peers import DEADLINE_S, a_client, a_hub, a_worker, collect, submit
from wfm_ds.transport.broker_clients import BrokerClients
from wfm_ds.transport.sockets import PipeError
from wfm_ds.transport.spool import NotInSpool, Spool
from wfm_ds.transport.wire import MAX_FRAME_BYTES
from wfm_ds.transport.worker import TaskResult


def ramp(task, progress):
    size = task.rows[0]["size"]
    return TaskResult({"size": size, "note": dict(task.announcement)}, [("ramp", np.arange(size, dtype=np.float32))])


def outcome(client):
    (found,) = collect(client).values()
    return found


def test_any_client_of_the_run_fetches_a_result_until_it_is_released(stack):
    hub = a_hub(stack)
    ann, bob, eve = (a_client(stack, hub, name=n, run=r) for n, r in (("ann", "run"), ("bob", "run"), ("ann", "other")))
    a_worker(stack, hub, ramp)
    size = MAX_FRAME_BYTES // 4 + 7  # two frames
    submit(ann, "a", [{"size": size}])
    assert outcome(ann).meta == {"size": size, "note": {}}
    for client in (bob, ann, bob):
        (array,) = client.fetch_results(["a"], DEADLINE_S)["a"].read_tensors()
        assert np.array_equal(array, np.arange(size, dtype=np.float32))
    with pytest.raises(PipeError, match="the broker does not have result a"):
        eve.fetch_results(["a"], DEADLINE_S)
    ann.release_results(["a"])
    with pytest.raises(PipeError, match="the broker does not have result a"):
        ann.fetch_results(["a"], DEADLINE_S)


def test_another_run_cannot_release_a_result(stack):
    hub = a_hub(stack)
    ann, eve = a_client(stack, hub), a_client(stack, hub, run="other")
    a_worker(stack, hub, ramp)
    submit(ann, "a", [{"size": 5}])
    assert outcome(ann).ok
    for word, fields in (
        ("release", {}),
        ("cancel", {"why": "spite"}),
    ):  # bypass the client's methods, which might check ownership
        eve._commands.put(lambda word=word, fields=fields: eve._send_ids(word, ["a"], **fields))
    with pytest.raises(PipeError, match="the broker does not have result a"):  # messages arrive in order
        eve.fetch_results(["a"], DEADLINE_S)
    assert len(ann.fetch_results(["a"], DEADLINE_S)["a"].read_tensors()[0]) == 5


def test_an_announcement_is_sent_with_later_tasks_and_its_files_are_served(stack, tmp_path):
    hub = a_hub(stack)
    ann, eve = a_client(stack, hub), a_client(stack, hub, run="workers", name="w")
    content = np.random.default_rng(0).integers(0, 256, MAX_FRAME_BYTES + 11).astype(np.uint8)
    (tmp_path / "weights").write_bytes(content.tobytes())
    hub.announce({"version": 3}, {"v3/weights": tmp_path / "weights"})
    submit(ann, "a", [{"size": 1}])  # queued until a worker connects
    hub.announce({"version": 4}, {"v3/weights": tmp_path / "weights"})
    a_worker(stack, hub, ramp)
    assert outcome(ann).meta["note"] == {"version": 4}
    read = np.concatenate(list(eve.read_file("v3/weights", len(content), DEADLINE_S)))
    assert np.array_equal(read, content)
    for name in ("weights", "../weights", str(tmp_path / "weights")):
        with pytest.raises(PipeError, match="the broker has no file"):
            list(eve.read_file(name, 1, DEADLINE_S))


def test_a_lost_release_is_repeated(stack, monkeypatch):
    """Without the repetition, the broker would keep the tensors forever."""
    heard = []

    def deaf_once(self, route, message, *rest):
        if message.type == "release":
            heard.append(list(message.fields["ids"]))
        if message.type != "release" or len(heard) > 1:
            answer(self, route, message, *rest)

    answer = BrokerClients._handle_message
    monkeypatch.setattr(BrokerClients, "_handle_message", deaf_once)
    monkeypatch.setattr("wfm_ds.transport.client.RELEASE_RETRY_S", 0.1)
    hub = a_hub(stack)
    client = a_client(stack, hub)
    a_worker(stack, hub, ramp)
    submit(client, "a", [{"size": 5}])
    assert outcome(client).ok
    client.release_results(["a"])
    until(lambda: heard and not client._pending_releases)
    assert len(heard) >= 2
    assert set(map(tuple, heard)) == {("a",)}
    with pytest.raises(PipeError, match="does not have result a"):
        client.fetch_results(["a"], DEADLINE_S)


def test_each_payload_has_the_full_timeout(stack, monkeypatch):
    """The broker sends each payload only after the client has received the previous one and waits again."""
    waits, again = [], threading.Condition()

    def slowly(self, route, message, *rest):
        if message.type == "fetch":
            before = "abc".index(message.fields["id"])
            with again:
                assert again.wait_for(lambda: len(waits) > before, DEADLINE_S)
        answer(self, route, message, *rest)

    def waiting(came, silence_s):
        with again:
            waits.append(silence_s)
            again.notify_all()
        return wait_for(came, silence_s)

    answer = BrokerClients._handle_message
    monkeypatch.setattr(BrokerClients, "_handle_message", slowly)
    hub = a_hub(stack)
    client = a_client(stack, hub)
    a_worker(stack, hub, ramp)
    for name in "abc":
        submit(client, name, [{"size": 5}])
        assert outcome(client).ok
    wait_for = client._condition.wait_for
    monkeypatch.setattr(client._condition, "wait_for", waiting)
    assert client.fetch_results("abc", 4 * DEADLINE_S).keys() == set("abc")
    assert waits == [4 * DEADLINE_S] * 3


def test_the_spool_drops_the_results_of_an_owner():
    spool = Spool()
    for task_id, owner in (("a", "run/ann"), ("b", "run/bob")):
        spool.put(task_id, owner, (), ())
    spool.drop_owner("run/ann")
    with pytest.raises(NotInSpool):
        spool.read_result("a", "run")
    spool.drop_results(["b", "unknown"], "run")
    assert not spool._results
