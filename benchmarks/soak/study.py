"""One soak from start to end: its processes, the signals sent to them, memory samples, and the checks."""

from __future__ import annotations

import bisect
import json
import os
import random
import selectors
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.soak.host import SCORERS, WORKERS
from benchmarks.soak.killer import Fault, Killer
from benchmarks.soak.memory import Histories, find_growth
from benchmarks.soak.process_tree import MARK, ROLES, ProcessTree, find_leftovers, find_shared_memory
from benchmarks.soak.samples import CHUNK, PER_STEP, read_count

REPOSITORY = Path(__file__).parents[2]
LOOK_S, MAPS_EVERY = 1.0, 10  # memory samples between reads of memory maps
START_S, STOP_S, WHOLE_S, END_S = 180.0, 60.0, 120.0, 20.0  # only limits for hanging processes
FAULTS_IN_A_ROW, QUIET_FAULTS = 20, 8  # faults, then intervals without any
FLAT_FROM = 5000  # samples
ALL = {"reward service": 1, "reward worker": 2 * SCORERS, "rollout worker": WORKERS}


class SoakError(Exception):
    """A sample is lost, duplicate or wrong, a process grows, or something is left over."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    samples: int
    kill_every_s: float  # mean
    seconds: float  # of a rollout worker for each sample
    seed: int


@dataclass
class Soak:
    """One soak. Call `run` once, with an empty folder that has a short path."""

    folder: Path
    plan: SoakPlan
    say: Callable[[str], None]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    histories: Histories = field(default_factory=Histories)
    pids: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # all processes so far, by role
    shared: set[Path] = field(default_factory=set)
    windows: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"kills": [], "quiet": []})
    times: list[float] = field(default_factory=list)  # when chunks finished
    counts: list[int] = field(default_factory=list)  # finished samples at these times
    over: threading.Event = field(default_factory=threading.Event)  # set when the client or the host has exited

    def run(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Run the soak. Return rows of the results and of memory. Raises SoakError."""
        (self.folder / "t").mkdir(mode=0o700)
        host = self._start_process("host", [str(self.folder)], stdin=subprocess.PIPE)
        client = None
        try:
            endpoint = str(self._read_line(host, START_S)["ready"])
            words = [endpoint, "--steps", str(self.plan.samples // PER_STEP), "--seconds", str(self.plan.seconds)]
            client = self._start_process("client", words)
            sent = self._inject_faults(host, client)
            if host.poll() is not None or client.wait(STOP_S):
                raise SoakError(f"client and host exited with {client.poll()}, {host.poll()}\n{self._log_tails()}")
            assert host.stdin is not None
            host.stdin.close()
            said = self._read_line(host, STOP_S)
            if host.wait(STOP_S):
                raise SoakError(f"the host exited with {host.returncode}\n{self._log_tails()}")
        finally:
            for process in (client, host):
                if process is not None:
                    process.kill()
                    process.wait()
        self._require_nothing_left()
        memory = self.histories.rows()
        if self.plan.samples >= FLAT_FROM and (grown := find_growth(memory)):
            raise SoakError("; ".join(grown))
        return self._result_rows(said, sent), memory

    # Processes

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
        """Return the ends of all logs."""
        logs = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    # While it runs

    def _inject_faults(self, host: subprocess.Popen[bytes], client: subprocess.Popen[bytes]) -> Counter[Fault]:
        """Send signals until the client has exited. Raises SoakError if a process is not replaced."""
        assert client.stdout is not None
        family, draw = ProcessTree(host.pid), random.Random(self.plan.seed)
        killer = Killer(family, draw, self.over.wait, self._num_finished)
        threads = [
            threading.Thread(target=self._read_counts, args=[client.stdout], daemon=True),
            threading.Thread(target=self._sample_memory, args=[family, host.pid, client.pid], daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while not self.over.is_set():
                self._inject_and_rest(killer, draw)
        finally:
            self.over.set()
            for thread in threads:
                thread.join(STOP_S)
        return killer.sent

    def _inject_and_rest(self, killer: Killer, draw: random.Random) -> None:
        began_s = time.monotonic()
        for _ in range(FAULTS_IN_A_ROW):
            if self.over.wait(draw.uniform(0.5, 1.5) * self.plan.kill_every_s):
                break
            done = self._num_finished()
            self.say(f"{done} samples; {killer.inject(spare_service=done > self.plan.samples / 2)}")
        while (sizes := killer.family.count_processes()) != ALL and not self.over.wait(LOOK_S):
            if time.monotonic() - began_s > FAULTS_IN_A_ROW * 3 * self.plan.kill_every_s + WHOLE_S:
                raise SoakError(f"processes that received a signal were not replaced: {sizes}\n{self._log_tails()}")
        whole_s = time.monotonic()
        self.windows["kills"].append((began_s, whole_s))
        if not self.over.wait(QUIET_FAULTS * self.plan.kill_every_s):
            self.windows["quiet"].append((whole_s, time.monotonic()))

    def _num_finished(self) -> int:
        return self.counts[-1] if self.counts else 0

    def _read_counts(self, stdout: IO[bytes]) -> None:
        for line in stdout:
            self.times.append(time.monotonic())
            self.counts.append(int(line))
        self.over.set()

    def _sample_memory(self, family: ProcessTree, host: int, client: int) -> None:
        number = 0
        while not self.over.wait(LOOK_S):
            if not psutil.pid_exists(host) or psutil.Process(host).status() == psutil.STATUS_ZOMBIE:
                self.over.set()
            for role in ROLES:
                alive = family.alive_processes(role)
                self.pids[role] |= {process.pid for process in alive}
                if role == "reward service" and alive:
                    self.histories.add_sample(role, alive[0])
            self.histories.add_sample("rollout hub", psutil.Process(host))
            if psutil.pid_exists(client):
                self.histories.add_sample("client", psutil.Process(client))
            if number % MAPS_EVERY == 0:
                self.shared |= find_shared_memory(self.mark)
            number += 1

    # At the end

    def _require_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(find_leftovers(self.mark), timeout=END_S)
        sockets = [path for path in self.folder.rglob("*") if path.is_socket() or path.name == "pipes.json"]
        files = [*sockets, *(self.folder / "t").iterdir(), *(path for path in self.shared if path.exists())]
        if alive or files:
            raise SoakError(f"left over: {alive} {[str(path) for path in files]}")

    def _result_rows(self, said: dict[str, Any], sent: Counter[Fault]) -> list[dict[str, Any]]:
        if said["failures"]:
            raise SoakError(f"failed workers: {said['failures']}")
        counts, total = Counter(said["counts"]), self.plan.samples
        figures: dict[str, Any] = {"samples, each once and right": total, "chunks": total // CHUNK}
        figures["minutes"] = (self.times[-1] - self.times[0]) / 60
        for (role, number), count in sorted(sent.items()):
            figures[f"{number.name} to a {role}"] = count
        figures["faults"] = sent.total()
        for role, pids in self.pids.items():
            figures[f"{role}s started"] = len(pids)
        figures["samples made again"] = read_count(self.folder / "made") - total
        figures["samples scored again"] = read_count(self.folder / "scored") - total
        figures["chunks that were leased again"] = counts["requeued"]
        figures["late results taken"] = counts["late"]
        figures["results recognised as double"] = counts["duplicate"] + counts["unknown"]
        for name, windows in self.windows.items():
            if windows:
                figures[f"samples/s, {name}"] = self._samples_per_second(windows)
        return [{"figure": name, "value": value} for name, value in figures.items()]

    def _samples_per_second(self, windows: Sequence[tuple[float, float]]) -> float:
        seconds = sum(end - begin for begin, end in windows)
        return sum(self._samples_until(end) - self._samples_until(begin) for begin, end in windows) / seconds

    def _samples_until(self, at_s: float) -> int:
        """Return the number of samples finished until a time."""
        index = bisect.bisect_right(self.times, at_s)
        return self.counts[index - 1] if index else 0
