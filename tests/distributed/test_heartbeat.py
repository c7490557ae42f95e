"""Heartbeats between real processes over real sockets, without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from wfm_ds.distributed import heartbeat
from wfm_ds.distributed.fault import RankStates
from wfm_ds.distributed.heartbeat import Heartbeat, JsonConnection, RankRegistry, is_communication_error
from wfm_ds.errors import UserError

WAIT_S = 60
HOST = "127.0.0.1"
RANK = """
import json, sys, threading
from wfm_ds.distributed import heartbeat
from wfm_ds.distributed.heartbeat import Heartbeat, RankRegistry
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.fault import RankStates

rank, address = int(sys.argv[1]), json.loads(sys.argv[2])
heartbeat.BEAT_INTERVAL_S = 0.2
limits = json.loads(sys.argv[3])

def say(**what):
    print(json.dumps(what), flush=True)

registry = None
if rank == 0:
    registry = RankRegistry(RankStates(3, **limits), "127.0.0.1")
    address = [registry.port, registry.token]
    say(address=address)
beating = Heartbeat(
    ("127.0.0.1", address[0]), address[1], rank,
    on_end=lambda text: say(fault=text), registry=registry, silent_s=limits["silent_s"],
)
say(ready=True)
for line in sys.stdin:
    word = line.strip()
    if word == "move":
        LIVENESS.start_operation("a forward")
    elif word == "stop":
        beating.stop()
        sys.exit(0)
    elif word == "fail":
        say(fault=beating.report_failure("ZeroDivisionError: x", is_secondary=False).text)
        sys.exit(1)
    elif word == "secondary":
        say(fault=beating.report_failure("RuntimeError: gloo", is_secondary=True).text)
        sys.exit(1)
"""
PATIENT = {"silent_s": 600.0, "stuck_s": 600.0, "max_gap_s": 1.0}


class Process:
    def __init__(self, rank, address=None, limits=PATIENT):
        command = [sys.executable, "-c", RANK, str(rank), json.dumps(address), json.dumps(limits)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def answer(self, key):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)[key]

    def tell(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


@pytest.fixture
def three():
    """Start three ranks with these limits."""
    started = []

    def start(**limits):
        limits = PATIENT | limits
        started.append(Process(0, limits=limits))
        address = started[0].answer("address")
        started.extend(Process(rank, address, limits) for rank in (1, 2))
        for process in started:
            assert process.answer("ready")
        return started

    yield start
    for process in started:
        process.process.kill()
        process.process.communicate()


def test_all_other_ranks_name_a_killed_rank_and_end(three):
    ranks = three()
    ranks[1].process.kill()
    for rank in (ranks[0], ranks[2]):
        text = rank.answer("fault")
        assert text.startswith(f"rank 1 (process {ranks[1].process.pid} on {socket.gethostname()}) is gone: its")
        assert rank.process.wait(WAIT_S) == 1


def test_a_killed_rank_0_is_named(three):
    ranks = three()
    ranks[0].process.kill()
    for rank in ranks[1:]:
        assert rank.answer("fault") == f"rank 0 ({HOST}) is gone: its connection closed"
        assert rank.process.wait(WAIT_S) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_rank_is_named(three, stopped):
    ranks = three(silent_s=8.0)
    os.kill(ranks[stopped].process.pid, signal.SIGSTOP)
    for rank in ranks:
        if rank is not ranks[stopped]:
            text = rank.answer("fault")
            assert text.startswith(f"rank {stopped} (")
            assert "is gone: no sign of life for " in text
            assert rank.process.wait(WAIT_S) == 1


@pytest.mark.slow
def test_a_wholly_suspended_job_continues(three):
    ranks = three(silent_s=8.0)
    for rank in reversed(ranks):
        os.kill(rank.process.pid, signal.SIGSTOP)
    threading.Event().wait(9.0)  # longer than the silence limit, which this test checks
    for rank in reversed(ranks):
        os.kill(rank.process.pid, signal.SIGCONT)
    threading.Event().wait(2.0)
    for rank in (1, 2, 0):
        ranks[rank].tell("stop")
        assert ranks[rank].process.wait(WAIT_S) == 0
    assert [rank.process.stdout.read() for rank in ranks] == ["", "", ""]


def test_a_stuck_rank_is_named_and_prints_its_stack(three):
    ranks = three(stuck_s=6.0)
    for rank in (ranks[0], ranks[2]):
        rank.tell("move")
    for rank in ranks:
        text = rank.answer("fault")
        assert text.startswith("rank 1 (")
        assert "is stuck: no progress for " in text
        assert text.endswith(" at start; the other ranks wait for it")
        assert rank.process.wait(WAIT_S) == 1
    assert "most recent call first" in ranks[1].process.stderr.read()  # rank 1 prints its stack
    assert "most recent call first" not in ranks[2].process.stderr.read()


def test_a_failed_rank_is_distinguished_from_consequential_failures(three):
    ranks = three()
    ranks[2].tell("secondary")
    ranks[1].tell("fail")
    texts = {rank.answer("fault") for rank in ranks}
    assert texts == {f"rank 1 (process {ranks[1].process.pid} on {socket.gethostname()}) failed: ZeroDivisionError: x"}
    assert [rank.process.wait(WAIT_S) for rank in ranks] == [1, 1, 1]


def test_ranks_that_have_finished_end_in_any_order(three):
    ranks = three()
    for rank in (1, 0, 2):
        ranks[rank].tell("stop")
        assert ranks[rank].process.wait(WAIT_S) == 0
    assert [rank.process.stdout.read() for rank in ranks] == ["", "", ""]


# ---- in this process


def test_unknown_peers_and_invalid_messages_are_disconnected():
    states = RankStates(2, **PATIENT)
    registry = RankRegistry(states, HOST)
    hello = {"where": "here", "rank": 1}
    for lines in (
        [b"GET / HTTP/1.1\r\n\r\n"],
        [json.dumps({"token": "guessed", **hello}).encode() + b"\n"],
        [json.dumps({"token": registry.token, "where": "here", "rank": 2}).encode() + b"\n"],
        [json.dumps({"token": registry.token, "where": "here", "rank": True}).encode() + b"\n"],
        [b"[1]\n"],
    ):
        with socket.create_connection((HOST, registry.port), timeout=WAIT_S) as peer:
            for line in lines:
                peer.sendall(line)
            assert peer.recv(1) == b""
    assert states.members == {}
    with socket.create_connection((HOST, registry.port), timeout=WAIT_S) as known:
        known.sendall(json.dumps({"token": registry.token, **hello}).encode() + b"\n")
        known.sendall(b'{"bye": true}\n')
        until_s = time.monotonic() + WAIT_S
        while 1 not in states.members or states.members[1].state != "done":
            assert time.monotonic() < until_s
            time.sleep(0.01)
        ending = threading.Thread(target=registry.stop)
        ending.start()
        assert known.recv(100) == b'{"bye": true}\n'
    ending.join(WAIT_S)
    assert not ending.is_alive()


def test_partial_lines_are_joined_and_limited():
    near, far = socket.socketpair()
    line = JsonConnection(near)
    far.sendall(b'{"beat": 1}\n{"be')
    assert line.receive() == [{"beat": 1}]
    far.sendall(b'at": 2}\n')
    assert line.receive() == [{"beat": 2}]
    far.close()
    assert line.receive() is None
    assert not line.send(beat=3)
    near, far = socket.socketpair()
    line, answers = JsonConnection(near), []
    for _ in range(heartbeat.MAX_LINE_BYTES // 10_000 + 1):
        far.sendall(b"x" * 10_000)
        answers.append(line.receive())
    assert answers == [[]] * (len(answers) - 1) + [None]
    far.close()


def test_an_unreachable_address_is_a_user_error(monkeypatch):
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        address = closed.getsockname()
    with pytest.raises(UserError, match=r"rank 3 on .* cannot reach rank 0 at 127.0.0.1:\d+ .*on all ports"):
        Heartbeat(address, "token", 3, on_end=print)


def test_for_a_foreign_address_rank_0_listens_on_all_interfaces(caplog):
    with heartbeat.listen("192.0.2.1") as server:  # an address reserved for documentation, which no host has
        assert server.getsockname()[0] in ("0.0.0.0", "::")
    assert "cannot listen on 192.0.2.1" in caplog.text


def test_other_machines_reach_a_rank_0_that_listens_on_all_addresses():
    registry = RankRegistry(RankStates(2, **PATIENT), None)
    beating = Heartbeat(("127.0.1.1", registry.port), registry.token, 1, on_end=print)
    beating.stop()
    registry.stop()


def test_a_fault_ends_the_process_even_if_stderr_fails(capfd):
    def full_disk(fault):
        raise OSError(28, "No space left on device", fault)

    codes, ended = [], threading.Event()

    def end(code):
        codes.append(code)
        ended.set()

    registry = RankRegistry(RankStates(2, **PATIENT), HOST)
    Heartbeat((HOST, registry.port), registry.token, 1, on_end=full_disk, exit_process=end)
    other = Heartbeat((HOST, registry.port), registry.token, 0, on_end=print, exit_process=print)
    assert other.report_failure("ZeroDivisionError: x", is_secondary=False).ranks == (0,)
    assert ended.wait(WAIT_S)
    other.stop()
    registry.stop()
    assert codes == [1]
    assert "No space left on device" in capfd.readouterr().err


def test_errors_of_collectives_are_recognized():
    import torch.distributed as dist

    assert is_communication_error(dist.DistNetworkError("x"))
    assert is_communication_error(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    wrapped = RuntimeError("another rank did not come")
    wrapped.__cause__ = RuntimeError("gloo timed out")
    assert is_communication_error(wrapped)
    assert not is_communication_error(ZeroDivisionError("division by zero"))
