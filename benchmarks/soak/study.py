"""One soak from start to end: its processes, the signals sent to them, memory samples, and the checks."""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.host import LOST_AFTER_S, SCORERS, WORKERS
from benchmarks.soak.processes import MARK, ROLES, MemoryLog, alive_processes, find_leftovers, find_shared_memory
from benchmarks.soak.samples import CHUNK, PER_STEP, read_count
from wfm_ds.rollout.child_process import DEATHS_WINDOW_S
from wfm_ds.rollout.reward_service import MAX_RESTARTS

REPOSITORY = Path(__file__).parents[2]
START_S, STOP_S, WHOLE_S, END_S = 180.0, 60.0, 180.0, 20.0  # only limits for hanging processes
FLAT_FROM = 5000  # minimum number of samples to check the growth of memory
ALL = {"reward service": 1, "reward worker": 2 * SCORERS, "rollout worker": WORKERS}
KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
# A seed decides their order. The list is shuffled and used up, repeatedly.
FAULTS = [
    *[("rollout worker", number) for number in (KILL, KILL, KILL, KILL, TERM, STOP, STOP)],
    *[("reward worker", number) for number in (KILL, KILL, KILL, KILL, TERM, STOP)],
    ("reward service", STOP),
]
FAULTS_IN_A_ROW = 20  # after these, wait until all processes run again
# The trainer restarts a service only MAX_RESTARTS times within DEATHS_WINDOW_S.
SERVICE_EVERY_S = DEATHS_WINDOW_S / MAX_RESTARTS + 10.0
MAX_PAUSE_S = {"rollout worker": 2 * LOST_AFTER_S}  # longer than the broker's worker timeout
SHORT_PAUSE_S = 4.0


class SoakError(Exception):
    """A sample is lost, duplicate or wrong, a process grows, or something is left over."""


@dataclass
class Soak:
    """One soak. Call `run` once, with an empty folder that has a short path."""

    folder: Path
    samples: int
    kill_every_s: float  # mean
    seconds: float  # of a rollout worker for each sample
    draw: random.Random
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    memory: MemoryLog = field(default_factory=MemoryLog)
    pids: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # all processes so far, by role
    shared: set[Path] = field(default_factory=set)
    num_finished: int = 0  # samples
    over: threading.Event = field(default_factory=threading.Event)  # set when the client or the host has exited
    sent: Counter[tuple[str, signal.Signals]] = field(default_factory=Counter)
    faults: list[tuple[str, signal.Signals]] = field(default_factory=list)
    service_fault_s: float = float("-inf")
    finished_at_faults: deque[int] = field(default_factory=lambda: deque(maxlen=2))  # of rollout workers

    def run(self) -> list[dict[str, Any]]:
        """Run the soak and return rows of results. Raises SoakError."""
        (self.folder / "t").mkdir(mode=0o700)
        host = self._start_process("host", [str(self.folder)], stdin=subprocess.PIPE)
        client = None
        try:
            words = ["--steps", str(self.samples // PER_STEP), "--seconds", str(self.seconds)]
            client = self._start_process("client", [str(self._read_line(host, START_S)["ready"]), *words])
            self._inject_faults(host, client)
            if host.poll() is not None or client.wait(STOP_S):
                raise SoakError(f"client and host exited with {client.poll()}, {host.poll()}\n{self._log_tails()}")
            assert host.stdin is not None
            host.stdin.close()
            said = self._read_line(host, STOP_S)
            if host.wait(STOP_S) or said["failures"]:
                raise SoakError(f"host exited with {host.returncode}: {said['failures']}\n{self._log_tails()}")
        finally:
            for process in (client, host):
                if process is not None:
                    process.kill()
                    process.wait()
        self._require_nothing_left()
        if self.samples >= FLAT_FROM and (grown := self.memory.find_growth()):
            raise SoakError("; ".join(grown))
        return self._result_rows(Counter(said["counts"]))

    def _start_process(self, name: str, words: Sequence[str], stdin: int | None = None) -> subprocess.Popen[bytes]:
        private = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.soak.{name}", *words],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env={**private, "TMPDIR": str(self.folder / "t"), MARK: self.mark},
            )

    def _read_line(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        """Return the next line of a process' stdout, as JSON. Raises SoakError at the timeout."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(timeout_s) else b""
        if not line:
            raise SoakError(f"no output from the host within {timeout_s:g} s\n{self._log_tails()}")
        content: dict[str, Any] = json.loads(line)
        return content

    def _log_tails(self) -> str:
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _inject_faults(self, host: subprocess.Popen[bytes], client: subprocess.Popen[bytes]) -> None:
        """Send signals until the client has exited. Raises SoakError if a process is not replaced."""
        root = psutil.Process(host.pid)
        threads = [
            threading.Thread(target=self._read_counts, args=[client.stdout], daemon=True),
            threading.Thread(target=self._watch, args=[root, client.pid], daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while not self.over.is_set():
                for _ in range(FAULTS_IN_A_ROW):
                    if self.over.wait(self.draw.uniform(0.5, 1.5) * self.kill_every_s):
                        break
                    sys.stderr.write(f"{self.num_finished} samples; {self._inject_fault(root)}\n")
                limit_s = time.monotonic() + WHOLE_S
                while (sizes := {role: len(alive_processes(root, role)) for role in ROLES}) != ALL:
                    if self.over.wait(1.0):
                        break
                    if time.monotonic() > limit_s:
                        raise SoakError(f"processes were not replaced: {sizes}\n{self._log_tails()}")
        finally:
            self.over.set()
            for thread in threads:
                thread.join(STOP_S)

    def _inject_fault(self, host: psutil.Process) -> str:
        """Send the next signal to a process, and return a message. A paused process continues before this returns."""
        role, number = self._draw_fault()
        if role == "rollout worker" and not self._may_disturb_chunks():
            return f"{number.name} not sent to a {role}: a chunk may have lost two workers"
        processes = alive_processes(host, role)
        if not processes:
            return f"no {role} is running"
        process = self.draw.choice(processes)
        if role == "rollout worker":
            self.finished_at_faults.append(self.num_finished)
        try:
            process.send_signal(number)
            self.sent[role, number] += 1
            if number == STOP:
                self.over.wait(self.draw.uniform(0.5, MAX_PAUSE_S.get(role, SHORT_PAUSE_S)))
                process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return f"{role} {process.pid} has already exited"
        return f"{number.name} to {role} {process.pid}"

    def _draw_fault(self) -> tuple[str, signal.Signals]:
        # Kill the service only in the first half, so that its memory is visible in the second half.
        is_first_half = self.num_finished <= self.samples / 2
        if is_first_half and time.monotonic() - self.service_fault_s > SERVICE_EVERY_S:
            self.service_fault_s = time.monotonic()
            return "reward service", self.draw.choice((KILL, TERM))
        if not self.faults:
            self.faults = self.draw.sample(FAULTS, len(FAULTS))
        return self.faults.pop()

    def _may_disturb_chunks(self) -> bool:
        """Return False while a chunk may have lost two workers. A chunk that loses three is abandoned by design.

        All chunks that were admitted at the fault before the last one must be finished: three steps at staleness 1.
        """
        before = self.finished_at_faults
        return len(before) < 2 or self.num_finished >= (before[0] // PER_STEP + 3) * PER_STEP

    def _read_counts(self, stdout: Any) -> None:
        for line in stdout:
            self.num_finished = int(line)
        self.over.set()

    def _watch(self, host: psutil.Process, client: int) -> None:
        """Record processes and their memory once a second."""
        while not self.over.wait(1.0):
            if not host.is_running() or host.status() == psutil.STATUS_ZOMBIE:
                self.over.set()
            for role in ROLES:
                self.pids[role] |= {process.pid for process in alive_processes(host, role)}
            for service in alive_processes(host, "reward service"):
                self.memory.add_sample("reward service", service.pid)
            self.memory.add_sample("rollout broker", host.pid)
            self.memory.add_sample("client", client)
            self.shared |= find_shared_memory(self.mark)

    def _require_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(find_leftovers(self.mark), timeout=END_S)
        sockets = [path for path in self.folder.rglob("*") if path.is_socket() or path.name == "pipes.json"]
        files = [*sockets, *(self.folder / "t").iterdir(), *(path for path in self.shared if path.exists())]
        if alive or files:
            raise SoakError(f"left over: {alive} {[str(path) for path in files]}")

    def _result_rows(self, counts: Counter[str]) -> list[dict[str, Any]]:
        figures: dict[str, Any] = {"samples, each once and right": self.samples, "chunks": self.samples // CHUNK}
        figures |= {f"{number.name} to a {role}": count for (role, number), count in sorted(self.sent.items())}
        figures["faults"] = self.sent.total()
        figures |= {f"{role}s started": len(pids) for role, pids in self.pids.items()}
        figures["samples made again"] = read_count(self.folder / "made") - self.samples
        figures["samples scored again"] = read_count(self.folder / "scored") - self.samples
        figures["chunks that were leased again"] = counts["requeued"]
        figures["late results taken"] = counts["late"]
        figures["results recognised as double"] = counts["duplicate"] + counts["unknown"]
        return [{"figure": name, "value": value} for name, value in figures.items()]
