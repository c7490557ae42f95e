"""HTTP clients that are silent, slow or too many, and bodies that decompress to a much larger size."""

import contextlib
import gzip
import resource
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from faults.processes import MIB, PATIENCE_S, modest, until, wait
from reward_http import Http, serving
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.types import MediaBatch

REWARD = "jpeg_incompressibility"
FIELDS = {"prompts": ["a cat"], "reward_fn": {REWARD: 1.0}, "media_type": "image"}
PICTURE = np.zeros((1, 8, 8, 3), np.uint8)
LIMITS = {
    "bind": "127.0.0.1:0",
    "max_body_mib": 64,
    "max_pending_mib": 128,
    "body_timeout_s": 1,
    "idle_timeout_s": 2,
    "max_connections": 40,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Start a reward service. Yield its process, the JSON that it printed and the path of its log."""
    folder = tmp_path_factory.mktemp("http_abuse")
    with serving(folder, {"http": LIMITS, "rewards": {REWARD: {}}}) as (process, said):
        yield process, said, folder / "service.log"


@pytest.fixture
def http(service):
    return Http(service[1]["http"], None)


def connect(service):
    address = urlsplit(service[1]["http"])
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)


def answer(connection):
    """Read until the service closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            received += more
    return received


def is_scored(http):
    return http.scores(FIELDS, PICTURE, REWARD)["scores"][REWARD][0] > 0


def is_scored_for_a_trainer(service):
    recipe = RewardRecipe(functions=[{"name": REWARD}], spawn=False, endpoint=service[1]["pipes"], start_timeout_s=30)
    client = RewardClient(recipe.endpoint, recipe, "run", "trainer")
    try:
        client.submit(MediaBatch(media=PICTURE, sample_ids=["s"], prompts=[""], metadata=[{}]))
        return client.wait()["s"][REWARD].value > 0
    finally:
        client.close()


def post(path, length, *headers):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", ""]).encode()


@pytest.mark.parametrize("path", ["/api/reward/enqueue", "/compute", "/api/reward/pull"])
def test_a_compressed_body_is_refused_before_it_is_decompressed(service, http, path):
    packed = gzip.compress(bytes(60 * MIB)) * 34  # 2 MiB that decompress to 2 GiB
    with modest(service[0]):
        status, content, _ = http.post(path, packed, **{"Content-Encoding": "gzip"})
    assert (status, content["error"]["code"]) == (415, "encoded")
    assert content["message"] == "Content-Encoding 'gzip' is not supported: send the body uncompressed"
    assert is_scored(http)


def test_announced_sizes_do_not_block_other_clients(service, http):
    with ExitStack() as stack:
        for _ in range(8):  # they claim 512 MiB in total; max_pending_mib is 128
            slow = stack.enter_context(connect(service))
            slow.sendall(post("/api/reward/enqueue", 64 * MIB) + b"x")
        assert is_scored(http)


def test_a_slow_body_has_a_deadline(service):
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(service)) for _ in range(3)]
        for connection, path in zip(slow, ("/api/reward/enqueue", "/compute", "/api/reward/pull"), strict=True):
            connection.sendall(post(path, 60000, "Content-Type: application/x-www-form-urlencoded"))
        for connection in slow:
            received = drip(connection)
            assert received.startswith(b"HTTP/1.1 408 ")
            assert b"within 1 s" in received


def drip(connection):
    """Send one byte per 0.1 s until an answer arrives, and return it, or b"" if the connection closes."""
    connection.settimeout(0.1)
    for _ in range(600):
        try:
            connection.sendall(b"x")
            return connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    pytest.fail("it may send for ever")


def test_silent_connections_are_closed_and_their_descriptors_freed(service, http):
    process = psutil.Process(service[0].pid)
    before = process.num_fds()
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(service)) for _ in range(30)]
        for number, connection in enumerate(silent):
            connection.sendall([b"", b"GET / HTT", b"GET /health HTTP/1.1\r\nHost: x\r\n"][number % 3])
        assert is_scored(http)
        assert [answer(connection) for connection in silent] == [b""] * 30
    until(lambda: process.num_fds() <= before)


def test_a_slow_header_is_cut_off(service):
    with connect(service) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nA: ")
        assert drip(slow) == b""


def test_an_unread_answer_is_dropped(service):
    process = psutil.Process(service[0].pid)
    before = process.num_fds()
    with connect(service) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            deaf.setblocking(False)
            for _ in range(2000):
                deaf.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: process.num_fds() > before)
        until(lambda: process.num_fds() <= before)


def test_a_connection_with_further_requests_stays_open(service):
    with connect(service) as connection:
        started = time.monotonic()
        while time.monotonic() - started < 4:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            wait(0.3)


def test_too_many_connections_get_an_error_and_trainers_are_served(service, http):
    lines = len(service[2].read_text().splitlines())
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(service)) for _ in range(300)]
        answers = [answer(connection) for connection in connections[-100:]]
        assert all(one.startswith(b"HTTP/1.1 503 ") and b"too many open connections" in one for one in answers)
        assert is_scored_for_a_trainer(service)
        until(lambda: http.get("/health")[0] == 200)  # after the silent connections are closed
    assert len(service[2].read_text().splitlines()) - lines <= 2


@contextlib.contextmanager
def descriptors(most):
    """Limit the number of file descriptors of processes started in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_few_descriptors_trainers_are_served_and_the_error_is_one_line(tmp_path):
    with ExitStack() as stack:
        with descriptors(128):
            served = stack.enter_context(
                serving(tmp_path, {"http": {**LIMITS, "idle_timeout_s": 60}, "rewards": {REWARD: {}}})
            )
        service = (*served, tmp_path / "service.log")
        silent = [stack.enter_context(connect(service)) for _ in range(200)]
        until(lambda: len(open_now(served[0])) >= 32)
        assert is_scored_for_a_trainer(service), "a quarter of the descriptors is the most that silent clients take"
        for connection in silent:
            connection.close()
        until(lambda: len(open_now(served[0])) == 0)
        used = psutil.Process(served[0].pid).num_fds()
        resource.prlimit(
            served[0].pid, resource.RLIMIT_NOFILE, (used + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        lines = len(service[2].read_text().splitlines())
        waiting = [stack.enter_context(connect(service)) for _ in range(10)]
        until(lambda: "cannot accept HTTP connections" in service[2].read_text())
        for connection in waiting[:1]:
            connection.settimeout(3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        assert len(service[2].read_text().splitlines()) - lines <= 3
        for connection in waiting:
            connection.close()
        until(lambda: Http(served[1]["http"], None).get("/health")[0] == 200)


def open_now(process):
    """Return the established TCP connections of a service."""
    port = {c.laddr.port for c in psutil.Process(process.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return [
        c
        for c in psutil.Process(process.pid).net_connections("tcp")
        if c.status == psutil.CONN_ESTABLISHED and c.laddr.port in port
    ]
