"""Invalid messages and unauthorized peers at the ports of a real reward service.

The service drops them, allocates no memory for them, and serves other clients at the same time.
"""

import contextlib
import itertools
import json
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from bad_frames import bombard
from faults.processes import GIB, PATIENCE_S, modest, until
from reward_http import TOKEN, Http, enqueue_body, serving
from transport.peers import create_peer_keys
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.transport.keys import create_key_pair
from wfm_ds.transport.messages import BROKER_TO_CLIENT
from wfm_ds.transport.wire import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    decode_message,
    encode_header,
)
from wfm_ds.types import MediaBatch

BRIGHTNESS = "probe_rewards:Brightness"
CONFIG = {"http": {"bind": "127.0.0.1:0"}, "rewards": {BRIGHTNESS: {"max_batch": 1}}}
# A client's part of the ZMTP 3.0 handshake with the NULL mechanism: greeting, then READY.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
COMMAND, LONG, MORE = 4, 2, 1  # frame flags
ATTACH = encode_header("attach", 1, {"run": "abuse", "client": "unlisted", "epoch": 1})


@pytest.fixture(scope="module")
def service(tmp_path_factory, probes):
    """Start a service without keys. Yield its process and the JSON that it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WFM_REWARD_TOKEN", TOKEN)
        with serving(tmp_path_factory.mktemp("abuse"), CONFIG) as served:
            yield served


def address(service):
    return json.loads(Path(service[1]["pipes"]).read_text())["clients"]


def connect(service):
    """Open a plain socket to the client port."""
    kind, _, place = address(service).partition("://")
    if kind == "tcp":
        return socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])), timeout=PATIENCE_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connection.connect(place)
    return connection


def remote_recipe(service, **keys):
    return RewardRecipe(functions=[{"name": BRIGHTNESS}], spawn=False, endpoint=service[1]["pipes"], **keys)


class Bystander:
    """A client that scores images one after the other and checks each score. `rounds` counts the scored images."""

    def __init__(self, service, **recipe):
        recipe = remote_recipe(service, timeout_s=PATIENCE_S, **recipe)
        self.client = RewardClient(recipe.endpoint, recipe, "run", "bystander")
        self.rounds, self.wrong, self.stopping = 0, [], threading.Event()
        self.thread = threading.Thread(target=self.score, daemon=True)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.rounds)
        return self

    def __exit__(self, *_):
        before = self.rounds
        try:
            until(lambda: self.rounds > before + 1 or self.wrong)  # check that it is still served
        finally:
            self.stopping.set()
            self.thread.join(PATIENCE_S)
            self.client.close()
        assert self.wrong == []

    def score(self):
        draw = np.random.default_rng(0)
        while not self.stopping.is_set():
            media = draw.integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
            self.client.submit(MediaBatch(media=media, sample_ids=["s"], prompts=[""], metadata=[{}]))
            score = self.client.wait()["s"][BRIGHTNESS]
            if score.value != pytest.approx(media.mean() / 255):
                self.wrong.append(score)
            self.rounds += 1


def metric(service, name):
    families = text_string_to_metric_families(Http(service[1]["http"]).get("/metrics")[1].decode())
    return next(f.samples[0].value for f in families if f.name == name)


def submission(tensors):
    task = {"id": "t", "kind": f"score:{BRIGHTNESS}", "start": 0, "stop": len(tensors), "deadline_s": 60.0}
    rows = [{"id": "s", "prompt": "", "metadata": {}, "fps": None}] * len(tensors)
    return msgpack.packb(
        {"v": PROTOCOL_VERSION, "t": "submit", "mid": 1, "rows": rows, "tasks": [task], "tensors": tensors}
    )


PICTURE = ["media", "uint8", [4, 4, 3]]
# Expected text of the answer and frames to send, by name. tests/transport/test_wire.py covers other malformed messages.
BAD_MESSAGES = {
    "many frames of nothing": ("is not msgpack", [b""] * 300),
    "half a header": ("is not msgpack", [ATTACH[: len(ATTACH) // 2]]),
    "a header that is too large": ("limit 65536", [bytes(MAX_HEADER_BYTES + 1)]),
    "a worker's message": ("'beat' is not expected here", [encode_header("beat", 1, {"progress": []})]),
    "an array that claims ten gigabytes": ("limits: 64, 1073741824", [submission([["media", "uint8", [10, GIB]]])]),
    "a list that claims four billion items": ("is not msgpack", [b"\x81\xa4rows\xdd\xff\xff\xff\xff"]),
    "a text that claims four gigabytes": ("is not msgpack", [b"\x81\xa1t\xdb\xff\xff\xff\xff"]),
    "a deep nest": ("is not msgpack", [b"\x91" * 60000]),
    "a gigabyte that is not there": ("frames of [] bytes", [submission([["media", "uint8", [1, 2**29]]] * 2)]),
    "an array that is cut off": ("frames of [47] bytes", [submission([PICTURE]), bytes(47)]),
    "too many frames": ("322 frames", [submission([PICTURE]), *[b"x"] * (MAX_FRAMES + 1)]),
}


@contextlib.contextmanager
def dealer():
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        yield peer


def test_bad_messages_are_counted_and_dropped(service):
    rejected = metric(service, "wfm_pipes_rejected")
    with dealer() as peer, Bystander(service), modest(service[0]):
        peer.connect(address(service))
        peer.send(ATTACH)
        assert peer.poll(PATIENCE_S * 1000)
        assert b"attached" in peer.recv()
        for name, (says, frames) in BAD_MESSAGES.items():
            peer.send_multipart(frames)
            assert peer.poll(PATIENCE_S * 1000), name
            answer = decode_message(peer.recv_multipart(), BROKER_TO_CLIENT)
            assert answer.type == "reject", name
            assert says in answer.fields["why"], name
    assert metric(service, "wfm_pipes_rejected") - rejected == len(BAD_MESSAGES)
    assert metric(service, "wfm_pipes_held_bytes") == 0


def test_a_frame_that_is_too_large_costs_its_sender_the_connection(service):
    with dealer() as peer, Bystander(service), modest(service[0]):
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.connect(address(service))
        peer.send_multipart([ATTACH, bytes(MAX_FRAME_BYTES + MAX_HEADER_BYTES + 1)])
        assert monitor.poll(PATIENCE_S * 1000)
        peer.disable_monitor()
        monitor.close()


@pytest.mark.parametrize("count", [400, 50_000])
def test_random_messages_are_answered_or_rejected_and_leave_nothing(service, count):
    rejected = metric(service, "wfm_pipes_rejected")
    with Bystander(service), modest(service[0]):
        told, invalid = bombard(address(service), count, seed=count)
    assert invalid > count / 2
    assert told["reject"] >= invalid, "what is no message is rejected; so is a submission of parts that do not fit"
    assert metric(service, "wfm_pipes_rejected") - rejected == told["reject"]
    assert metric(service, "wfm_pipes_held_bytes") == 0


def frame(body, flags=0):
    return bytes([flags, len(body)]) + body


def greeted(service):
    """Open a plain socket and complete the ZMTP handshake."""
    connection = connect(service)
    connection.sendall(GREETING + frame(READY, COMMAND))
    read_until(connection, b"READY")
    return connection


def attached(service):
    """Open a plain socket and attach as a client."""
    connection = greeted(service)
    connection.sendall(frame(ATTACH))
    read_until(connection, b"attached")
    return connection


def read_until(connection, word):
    received = b""
    while word not in received:
        more = connection.recv(4096)
        assert more, received
        received += more


def is_cut_off(connection):
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def test_a_frame_that_claims_ten_gigabytes_allocates_nothing(service):
    with Bystander(service), modest(service[0]):
        for size, flags in itertools.product((10 * GIB, 2**63 - 1, 2**64 - 1), (LONG, LONG | MORE, LONG | COMMAND)):
            with attached(service) as connection:
                connection.sendall(struct.pack(">BQ", flags, size) + b"x")
                assert is_cut_off(connection)


def test_unfinished_frames_use_little_memory(service):
    process = psutil.Process(service[0].pid)
    with Bystander(service), modest(service[0]):
        before = process.num_fds()
        with ExitStack() as stack:
            for claimed in (1, MAX_FRAME_BYTES):
                for _ in range(20):
                    connection = stack.enter_context(attached(service))
                    connection.sendall(frame(ATTACH, MORE) + struct.pack(">BQ", LONG, claimed))
            assert process.num_fds() >= before + 40
        until(lambda: process.num_fds() <= before + 2)


JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    bytes(5000),
    b"\xff" * 5000,
    GREETING[:20],
    GREETING,
    GREETING + frame(READY, COMMAND)[:-3],
    GREETING + frame(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffDEALER", COMMAND),
    GREETING + frame(READY, COMMAND) + frame(ATTACH),  # sent without waiting for the answer
    GREETING.replace(b"NULL\0", b"PLAIN"),
    GREETING.replace(b"NULL\0", b"CURVE"),
]
JUNK_BEHIND_A_HANDSHAKE = [
    frame(b"\x04PING", COMMAND),
    frame(b"\x05OTHER" + bytes(50), COMMAND),
    frame(b"", COMMAND),
    frame(ATTACH)[:-1],
    frame(ATTACH, MORE),
    bytes([0xF8]) + bytes(200),
    b"\xff" * 5000,
]


def test_junk_on_the_client_port_disturbs_no_client(service):
    for opened, junk in [*((connect, junk) for junk in JUNK), *((greeted, junk) for junk in JUNK_BEHIND_A_HANDSHAKE)]:
        with Bystander(service), modest(service[0]):
            for _ in range(5):
                with opened(service) as connection:
                    send_and_close(connection, junk)


def send_and_close(connection, junk):
    with contextlib.suppress(OSError):  # the service may close it immediately
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
    assert is_cut_off(connection)


def test_silent_connections_are_closed_and_their_descriptors_freed(service):
    process = psutil.Process(service[0].pid)
    with Bystander(service) as bystander, modest(service[0]), ExitStack() as stack:
        before = process.num_fds()
        silent = [stack.enter_context(connect(service)) for _ in range(300)]
        rounds = bystander.rounds
        until(lambda: bystander.rounds > rounds + 3)
        assert all(is_cut_off(connection) for connection in silent), "by the service, not by us"
        until(lambda: process.num_fds() <= before + 2)


def flood(service, count):
    """Open `count` connections that send thousands of small frames mixed with heartbeats and then close."""
    frames = (frame(b"x") * 20 + frame(b"\x04PING\x00\x64", COMMAND)) * 100
    for _ in range(count):
        with connect(service) as connection, contextlib.suppress(OSError):
            connection.sendall(GREETING + frame(READY, COMMAND))
            connection.recv(4096)
            connection.sendall(frames)


def test_the_service_survives_a_flood_of_closing_connections(service):
    """libzmq 4.3.5 aborts if receive limits are combined with heartbeats. The service must survive the flood."""
    process = psutil.Process(service[0].pid)
    with Bystander(service):
        before = process.num_fds()
        flood(service, 600)
        until(lambda: process.num_fds() <= before + 2)


# Unauthorized peers


CLOSING_PEER = """
import sys, time, zmq
from wfm_ds.transport.sockets import Dealer

context = zmq.Context()
dealer = Dealer(context, sys.argv[1])
while not dealer.send_message("beat", {"progress": []}, frames=[bytes(64 * 2**20)]):  # more than the broker reads
    time.sleep(0.01)
print("sent", flush=True)
sys.stdin.readline()
dealer.close()
print("closed", flush=True)
context.term()
print("ended", flush=True)
"""


def test_a_peer_that_closes_survives_a_message_and_a_hangup_of_its_broker(tmp_path):
    """The message arrives after the peer closed its socket, while it still waits to send its own."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "broker"))
        listener.listen()
        peer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CLOSING_PEER, f"ipc://{tmp_path / 'broker'}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(peer.kill)
        connection = stack.enter_context(closing(listener.accept()[0]))
        connection.sendall(GREETING + frame(READY.replace(b"\x06DEALER", b"\x06ROUTER"), COMMAND))
        assert peer.stdout.readline() == "sent\n"
        peer.stdin.write("\n")
        peer.stdin.flush()
        assert peer.stdout.readline() == "closed\n"
        connection.sendall(frame(b"late"))
        connection.close()
        assert peer.stdout.readline() == "ended\n"
        assert peer.wait(PATIENCE_S) == 0


@pytest.fixture
def guarded(tmp_path, monkeypatch, probes):
    """Start a service with a token and keys. It accepts ann and bob but not eve, and bob has a wrong broker key."""
    monkeypatch.setenv("WFM_REWARD_TOKEN", TOKEN)
    hub, other = tmp_path / "hub", tmp_path / "other"
    for folder in (hub, other):
        create_key_pair(folder, "hub")
    for name, broker, accepted_by in (("ann", hub, hub), ("bob", other, hub), ("eve", hub, None)):
        create_peer_keys(tmp_path / name, broker, accepted_by)
    with serving(tmp_path, {**CONFIG, "pipes": {"clients": "tcp://127.0.0.1:0", "keys": "hub"}}) as served:
        yield served


def test_a_flood_without_keys_is_not_read(guarded, tmp_path):
    with Bystander(guarded, keys=str(tmp_path / "ann")), modest(guarded[0]):
        flood(guarded, 300)
    assert metric(guarded, "wfm_pipes_rejected") == 0


def test_wrong_or_missing_keys_and_tokens_are_errors_and_nothing_is_delivered(guarded, tmp_path):
    says = {
        "eve": "the broker does not accept key eve: copy public/eve.key to its key folder",
        "bob": "public/hub.key is not the broker's key, or it has none",
        None: "tcp:// needs keys",
    }
    with Bystander(guarded, keys=str(tmp_path / "ann")), modest(guarded[0]):
        for name, sentence in says.items():
            keys = None if name is None else str(tmp_path / name)
            recipe = remote_recipe(guarded, keys=keys, start_timeout_s=1)
            until(lambda recipe=recipe, sentence=sentence: sentence in refusal(recipe))
        with connect(guarded) as connection, contextlib.suppress(ConnectionError):  # without our client code
            connection.sendall(GREETING + frame(READY, COMMAND) + frame(ATTACH))
            assert is_cut_off(connection)
        for token in (None, "", "wrong", TOKEN[:-1]):
            body = enqueue_body({"prompts": [""], "reward_fn": {BRIGHTNESS: 1}}, np.zeros((1, 4, 4, 3), np.uint8))
            status, content, _ = Http(guarded[1]["http"], token).post("/api/reward/enqueue", body)
            assert (status, content["error"]["code"]) == (401, "unauthorized")
        assert metric(guarded, "wfm_pipes_rejected") == 0, "not a message of theirs arrived"
        page = Http(guarded[1]["http"]).get("/")[1].decode()
        assert ("run/bystander" in page, "unlisted" in page) == (True, False)


def refusal(recipe):
    with pytest.raises(RewardError) as error:
        RewardClient(recipe.endpoint, recipe, "run", "unlisted")
    return str(error.value)
