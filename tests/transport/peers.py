"""A broker, clients and workers in threads of this process, and raw peers that send any message."""

import contextlib
import itertools
import shutil
import threading
import time

import pytest
import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.broker import Broker, TaskKind
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.keys import create_key_pair
from wfm_ds.transport.messages import BROKER_TO_CLIENT, BROKER_TO_WORKER, CLIENT_TO_BROKER, WORKER_TO_BROKER
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import Dealer
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.transport.worker import LeaseWorker

KIND = "work"
DEADLINE_S = 20.0


@pytest.fixture
def stack():
    """Yield an ExitStack with a folder for sockets, in which no socket must remain."""
    with SocketFolder() as folder, contextlib.ExitStack() as stack:
        stack.folder = folder
        yield stack
        stack.close()
        assert not list(folder.iterdir()), "sockets are removed"


def a_hub(stack, *, name="", clients=None, workers=None, kinds=None, stall_s=60.0, **options):
    """Start a broker at the given addresses or with sockets NAMEc and NAMEw in the folder of the stack."""
    clients, workers = (at or f"ipc://{stack.folder}/{name}{end}" for at, end in ((clients, "c"), (workers, "w")))
    hub = Broker(clients=clients, workers=workers, kinds=kinds or {KIND: TaskKind(stall_s, {"x": 1})}, **options)
    hub.start()
    stack.callback(hub.stop, 0.0)
    return hub


def a_client(stack, hub, *, run="run", name="ann", keys=None, attach=True):
    client = PipeClient(getattr(hub, "client_endpoint", hub), run=run, client=name, keys=keys)
    stack.callback(client.close)
    if attach:
        client.attach(DEADLINE_S)
    return client


def a_worker(stack, hub, handle, name="w", **options):
    """Start a worker in a thread; return both."""
    endpoint = getattr(hub, "worker_endpoint", hub)
    worker = LeaseWorker(endpoint, worker=name, name=name, kinds=[KIND], **options)

    def run():
        with contextlib.suppress(SystemExit):
            worker.run(handle)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    stack.callback(lambda: (worker.stop(), thread.join(DEADLINE_S)))
    return worker, thread


def submit(client, task_id, rows=({},), tensors=(), kind=KIND):
    tensors = [("media", tensor) for tensor in tensors]
    client.submit(list(rows), tensors, [TaskRequest(task_id, kind, 0, len(rows), client.now_s() + 600)])


def collect(client, count=1):
    """Return the outcomes by task id; assert that each arrives exactly once."""
    outcomes = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while len(outcomes) < count and time.monotonic() < deadline_s:
        for outcome in client.take_outcomes(0.5):
            assert outcome.id not in outcomes, "every task has one outcome"
            outcomes[outcome.id] = outcome
    assert len(outcomes) == count
    return outcomes


def create_peer_keys(folder, broker, accepted_by=None):
    """Create the keys of a peer that knows the key of `broker`. The broker `accepted_by` knows the peer's key."""
    create_key_pair(folder, folder.name)
    shutil.copy(broker / "public" / "hub.key", folder / "public")
    if accepted_by is not None:
        shutil.copy(folder / "public" / f"{folder.name}.key", accepted_by / "public")


class RawPeer:
    """A bare client or worker that can send messages which real clients and workers never send."""

    def __init__(self, stack, endpoint):
        context, self.mids = zmq.Context(), itertools.count(1)
        self.dealer = Dealer(context, endpoint)
        set_timeouts(self.dealer.socket)
        stack.callback(lambda: (self.dealer.close(), context.term()))

    def say(self, message_type, **fields):
        self.send(wire.encode_header(message_type, next(self.mids), fields))

    def send(self, *frames):
        self.dealer.socket.send_multipart(frames)

    def hear(self, message_type):
        return hear(self.dealer.socket.recv_multipart, BROKER_TO_WORKER | BROKER_TO_CLIENT, message_type)


class RawWorker(RawPeer):
    def __init__(self, stack, hub, name="raw", life="1", held=()):
        super().__init__(stack, hub.worker_endpoint)
        self.say("hello", worker=name, life=life, name=name, kinds=[KIND], credit=1, held=list(held))
        self.hear("welcome")

    def finish(self, task, meta=None):
        self.say("result", id=task["id"], attempt=task["attempt"], seconds=0.1, meta=meta or {"by": "raw"})


class RawHub:
    """Raw broker for clients or workers."""

    def __init__(self, stack):
        context, self.route, self.endpoint = zmq.Context(), b"", f"ipc://{stack.folder}/raw"
        self.socket = context.socket(zmq.ROUTER)
        set_timeouts(self.socket)
        self.socket.bind(self.endpoint)
        stack.callback((stack.folder / "raw").unlink)
        stack.callback(context.destroy, linger=0)

    def hear(self, message_type):
        return hear(self._receive, CLIENT_TO_BROKER | WORKER_TO_BROKER, message_type)

    def _receive(self):
        self.route, *frames = self.socket.recv_multipart()
        return frames

    def say(self, message_type, **fields):
        self.socket.send_multipart([self.route, wire.encode_header(message_type, 1, fields)])


def set_timeouts(socket):
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        socket.set(option, int(1000 * DEADLINE_S))


def hear(receive, types, message_type):
    """Return the fields of the next message of this type; drop other messages."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        message = wire.decode_message(receive(), types)
        if message.type == message_type:
            return message.fields
    raise AssertionError(f"no {message_type} within {DEADLINE_S:g} s")
