"""Throughput of tensors between two processes, compared with raw pyzmq and pickle over HTTP: `python -m
benchmarks.pipes`.

One sender and one receiver run on this machine. Peers take turns, so that all run under the same load. The receiver of
each peer ends with its own copy of the tensor: raw pyzmq copies the frames into one tensor, ours does the same after
its checks and checksums, and pickle creates one.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import pickle
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import psutil
import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.messages import BROKER_TO_CLIENT, CLIENT_TO_BROKER
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import Dealer, Router, SendQueueFull

WINDOW = 4  # messages in flight
SMALL = 200  # bytes of the message for round trips


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipes", description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 8, 32], help="sizes of the tensors")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of one round of one peer")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--receive", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.receive:
        return run_receiver(options.receive)
    sockets = SocketFolder()
    folder = sockets.path
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pipes", "--receive", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        port, endpoint = child.stdout.readline().split()
        places = {"ipc": [f"ipc://{folder}/{name}" for name in ("raw", "ours")], "tcp": endpoint.split(",")}
        rows = [row for name, at in places.items() for row in _measure_transport(name, at, port, child.pid, options)]
    finally:
        child.kill()
        child.wait()
        sockets.remove()
    from benchmarks import report

    sys.stdout.write(report.format_table(rows) + "\n")
    if options.write:
        sys.stdout.write(f"{report.write_results('pipes', report.describe_machine(), rows)}\n")
    return 0


def _measure_transport(
    transport: str, at: Sequence[str], port: str, receiver: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    context: zmq.Context[Any] = zmq.Context()
    rows, both = [], (psutil.Process(), psutil.Process(receiver))
    for mib in options.mib:
        tensor = np.random.default_rng(0).integers(0, 256, mib * 2**20, dtype=np.uint8)
        peers: dict[str, Any] = {
            "raw pyzmq": Raw(context, at[0]),
            "wfm_ds.transport": Ours(context, at[1]),
            "pickle, HTTP": Http(port),
        }
        rates: dict[str, list[float]] = {name: [] for name in peers}
        costs: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                rate, cost = _measure_rate(peer, tensor, options.seconds, both)
                rates[name].append(rate)
                costs[name].append(cost)
        trips = {name: _measure_round_trips(peer, options.seconds) for name, peer in peers.items()}
        for name, peer in peers.items():
            best = [a / b for a, b in zip(rates[name], rates["raw pyzmq"], strict=True)]
            rows.append({
                "transport": "HTTP" if name.endswith("HTTP") else transport,
                "peer": name,
                "MiB": mib,
                "GiB/s": _summarize(rates[name]),
                "of raw": _summarize(best),
                "processor s/GiB": _summarize(costs[name]),
                "round trip us": _summarize(trips[name]),
            })  # fmt: skip
            peer.close()
    context.term()
    return rows


def _measure_rate(
    peer: Any, tensor: wire.Array, seconds: float, processes: Sequence[psutil.Process]
) -> tuple[float, float]:
    """Return GiB/s with WINDOW messages in flight, and the processor seconds of both processes for each GiB."""
    peer.send(tensor)
    peer.wait(0)  # connected and warmed up
    busy, count, started = _cpu_seconds(processes), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        peer.send(tensor)
        count += 1
        peer.wait(WINDOW - 1)
    peer.wait(0)
    size = count * tensor.nbytes / 2**30
    return size / (time.perf_counter() - started), (_cpu_seconds(processes) - busy) / size


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _measure_round_trips(peer: Any, seconds: float) -> list[float]:
    small = np.zeros(SMALL, np.uint8)
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        peer.send(small)
        peer.wait(0)
        found.append((time.perf_counter() - started) * 1e6)
    return found


def _summarize(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


# Senders


class Raw:
    """Sends the same frames as ours, and nothing else."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._open = 0

    def send(self, tensor: wire.Array) -> None:
        data = tensor.data
        frames = [data[at : at + wire.MAX_FRAME_BYTES] for at in range(0, tensor.nbytes, wire.MAX_FRAME_BYTES)]
        self._socket.send_multipart([b"tensor", *frames], copy=False)
        self._open += 1

    def wait(self, most: int) -> None:
        while self._open > most:
            self._socket.recv()
            self._open -= 1

    def close(self) -> None:
        self._socket.close(linger=0)


class Ours:
    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._dealer = Dealer(context, endpoint)
        self._mids = itertools.count(1)
        self._open = 0

    def send(self, tensor: wire.Array) -> None:
        specs, frames = wire.pack_tensors([("media", tensor)])
        header = wire.encode_header("submit", next(self._mids), {"rows": [{"id": "a"}], "tasks": []}, specs)
        while True:
            try:
                self._dealer.send(header, list(itertools.chain(*frames)))
                break
            except SendQueueFull:
                self._dealer.socket.poll(10)
        self._open += 1

    def wait(self, most: int) -> None:
        while self._open > most:
            self._dealer.socket.poll()
            while (frames := self._dealer.receive()) is not None:
                wire.decode_message([frame.buffer for frame in frames], BROKER_TO_CLIENT)
                self._open -= 1

    def close(self) -> None:
        self._dealer.close()


class Http:
    def __init__(self, port: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", int(port))

    def send(self, tensor: wire.Array) -> None:
        self._connection.request("POST", "/", pickle.dumps(tensor, protocol=5))
        self._connection.getresponse().read()

    def wait(self, most: int) -> None:
        """Do nothing: `send` waits for the reply."""

    def close(self) -> None:
        self._connection.close()


# The receiving process


def run_receiver(folder: str) -> int:
    """Serve all peers until stdin is closed. Prints the endpoints to stdout."""
    context: zmq.Context[Any] = zmq.Context()
    tcp = []
    for transport in ("ipc", "tcp"):
        raw = context.socket(zmq.ROUTER)
        raw.bind(f"ipc://{folder}/raw" if transport == "ipc" else "tcp://127.0.0.1:*")
        ours = Router(context, f"ipc://{folder}/ours" if transport == "ipc" else "tcp://127.0.0.1:*")
        tcp = [raw.get_string(zmq.LAST_ENDPOINT), ours.endpoint]
        threading.Thread(target=_serve_raw, args=(raw,), daemon=True).start()
        threading.Thread(target=_serve_ours, args=(ours,), daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Unpickler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port} {','.join(tcp)}\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


def _serve_raw(router: zmq.Socket[Any]) -> None:
    while True:
        route, _, *frames = router.recv_multipart(copy=False)
        tensor, at = np.empty(sum(len(frame) for frame in frames), np.uint8), 0
        for frame in frames:
            tensor[at : at + len(frame)] = np.frombuffer(frame.buffer, np.uint8)
            at += len(frame)
        router.send_multipart([route.bytes, b"ok"])


def _serve_ours(router: Router) -> None:
    answer = {"ids": ["a"], "known": [], "refused": []}
    while True:
        router.socket.poll()
        while (received := router.receive()) is not None:
            route, frames = received
            message = wire.decode_message([frame.buffer for frame in frames], CLIENT_TO_BROKER)
            message.read_tensors()
            router.send(route, wire.encode_header("accepted", message.message_id, answer))


class _Unpickler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a reply in two parts takes 40 ms

    def do_POST(self) -> None:
        pickle.loads(self.rfile.read(int(self.headers["Content-Length"])))  # noqa: S301  (the peer to measure)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        """Disable logging of requests."""


if __name__ == "__main__":
    sys.exit(main())
