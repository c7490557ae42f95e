"""A proxy between a broker and its peers that drops, duplicates, delays and reorders messages in both directions."""

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.messages import SCHEMAS

EVERY_TYPE = frozenset(SCHEMAS)
LOSE, DOUBLE, DELAY_S = 4, 3, 0.03


class FaultyProxy:
    """Peers connect to `endpoint`. The proxy forwards messages to and from the broker at `target`, with faults.

    Messages are numbered per type. A message is dropped if its number is a multiple of LOSE, or of `lose[type]`, and
    duplicated if it is a multiple of DOUBLE. Every message is delayed by up to DELAY_S, so messages overtake each
    other. `faults` counts the faults by (kind, type).
    """

    def __init__(self, endpoint, target, lose=MappingProxyType({})):
        self.endpoint, self.target, self.lose = endpoint, target, lose
        self.random = random.Random(0)
        self.faults, self._seen = Counter(), Counter()
        self._due, self._order = [], itertools.count()
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.bind(endpoint)
        self._back = {}  # one connection to the broker per peer, by the peer's route
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        self._stopping.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _socket(self, kind):
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        return made

    def _run(self):
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(5))
            if self._front in ready:
                route, *frames = self._front.recv_multipart()
                if route not in self._back:
                    self._back[route] = self._socket(zmq.DEALER)
                    self._back[route].connect(self.target)
                    poller.register(self._back[route], zmq.POLLIN)
                self._plan(self._back[route], [], frames)
            for route, back in self._back.items():
                if back in ready:
                    self._plan(self._front, [route], back.recv_multipart())
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, socket, frames = heapq.heappop(self._due)
                socket.send_multipart(frames)
        for socket in (self._front, *self._back.values()):
            socket.close()
        self._context.term()
        Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _plan(self, socket, address, frames):
        message = wire.decode_message(frames, EVERY_TYPE)
        self._seen[message.type] += 1
        number = self._seen[message.type]
        if number % self.lose.get(message.type, LOSE) == 0:
            self.faults["lost", message.type] += 1
            return
        times = 2 if number % DOUBLE == 0 else 1
        self.faults["doubled", message.type] += times - 1
        for _ in range(times):
            at_s = time.monotonic() + self.random.uniform(0, DELAY_S)
            if self._due and at_s < max(self._due)[0]:
                self.faults["overtook", message.type] += 1
            heapq.heappush(self._due, (at_s, next(self._order), socket, [*address, *frames]))
