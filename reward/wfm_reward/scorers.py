"""Supervise the worker processes of a service (scorers and decoders): start, watch, restart with back-off, stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import wfm_ds
import wfm_reward
from wfm_ds.errors import RewardError
from wfm_ds.pipes.hub import Hub
from wfm_ds.pipes.status import Ended, HubStatus
from wfm_reward import registry
from wfm_reward.config import DecoderConfig, RewardConfig

log = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATHS_WINDOW_S = 600.0
MAX_BACK_OFF_S = 60.0
STALL_GRACE_S = 5.0  # for a hung worker to exit by itself and log its stacks
ANSWER_S = 0.2  # for the broker to report the state of a worker
STOP_S = 3.0  # for an idle process to exit after its stdin is closed


@dataclass(frozen=True, slots=True)
class Program:
    """How to start `workers` processes: `python -m MODULE` with the settings as JSON on stdin."""

    title: str  # for messages, such as "reward ocr"
    kind: str  # task kind
    module: str
    settings: Mapping[str, Any]  # in addition to the settings of every worker
    device: str
    workers: int
    python: Path | None = None


def scorer(name: str, config: RewardConfig) -> Program:
    """Return the program of the workers of a reward."""
    settings = config.model_dump(include={"device", "options", "max_batch", "max_wait_ms"})
    settings["stall_s"] = stall_s(name, config)
    return Program(
        f"reward {name}", f"score:{name}", "wfm_reward.worker", {"reward": name, **settings}, config.device,
        config.workers, config.python,
    )  # fmt: skip


def stall_s(name: str, config: RewardConfig) -> float:
    """Return `stall_s` of the configuration, else of the reward class."""
    return registry.describe(name).stall_s if config.stall_s is None else config.stall_s


def decoder(channels: int, config: DecoderConfig, folder: Path) -> Program:
    """Return the program that decodes latents with this many channels to video files in a folder."""
    settings = {**config.model_dump(), "channels": channels, "folder": str(folder.absolute())}
    title = f"latent decoder {channels}"
    return Program(title, f"decode:{channels}", "wfm_reward.decoder", settings, config.device, 1)


@dataclass(slots=True)
class _Scorer:
    """One slot of the pool, with its current process if any."""

    reward: str
    name: str  # for messages, such as "ocr-0"
    process: subprocess.Popen[bytes] | None = None
    worker: str = ""  # id of the process at the broker; new for each process
    ready: bool = False
    started_at_s: float = 0.0
    start_at_s: float = 0.0  # earliest time of the next start
    kill_at_s: float = float("inf")  # earliest time to kill a stalled process
    asked: Future[HubStatus] | None = None  # pending check whether it is still stalled
    worked: bool = False  # of the current process
    quick_deaths: int = 0  # consecutive
    starts: int = 0


@dataclass(frozen=True, slots=True)
class ScorerState:
    """State of one slot of the pool, for the status page."""

    reward: str
    name: str
    worker: str
    pid: int | None
    device: str
    ready: bool
    restarts: int


@dataclass(slots=True)
class Scorers:
    """The worker processes of all programs. The supervisor loop calls `supervise`. Only `stop` blocks."""

    hub: Hub
    programs: dict[str, Program]  # by name of the reward or decoder
    selector: selectors.BaseSelector
    down: dict[str, str] = field(default_factory=dict)  # by reward
    all_were_ready: bool = False
    _scorers: list[_Scorer] = field(default_factory=list)
    _deaths: dict[str, deque[float]] = field(default_factory=dict)  # times of deaths since the last finished task
    _worked: set[str] = field(default_factory=set)  # rewards that finished a task since their last death

    def __post_init__(self) -> None:
        for name, program in self.programs.items():
            self._scorers += [_Scorer(name, f"{name}-{i}") for i in range(program.workers)]
            self._deaths[name] = deque()

    def states(self) -> list[ScorerState]:
        """Return the state of all slots. Thread-safe."""
        return [
            ScorerState(
                reward=s.reward,
                name=s.name,
                worker=s.worker,
                pid=process.pid if (process := s.process) else None,
                device=self.programs[s.reward].device,
                ready=s.ready,
                restarts=max(0, s.starts - 1),
            )
            for s in self._scorers
        ]

    def waiting_for(self) -> list[str]:
        """Return the names of rewards with a process that is not ready."""
        return sorted({slot.reward for slot in self._scorers if not slot.ready})

    def supervise(self, now_s: float) -> None:
        """Start scheduled processes and reap dead ones. Raises RewardError if a reward fails during startup."""
        for slot in self._scorers:
            if slot.process is not None and now_s >= slot.kill_at_s and self._hangs(slot, now_s):
                log.error("%s makes no progress and does not exit (pid %d): killed", slot.name, slot.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(slot.process.pid, signal.SIGKILL)
                slot.process.wait()
            if slot.process is not None and slot.process.poll() is not None:
                self._reap(slot, now_s)
            if slot.process is None and slot.reward not in self.down and now_s >= slot.start_at_s:
                self._start(slot, now_s)
        self.all_were_ready = self.all_were_ready or not self.waiting_for()

    def next_start_s(self, now_s: float) -> float:
        """Return the seconds until `supervise` must start or kill a process; inf if nothing is scheduled."""
        planned = [s.start_at_s for s in self._scorers if s.process is None and s.reward not in self.down]
        planned += [s.kill_at_s for s in self._scorers if s.process is not None]
        return max(0.0, min(planned, default=float("inf")) - now_s)

    def stalled(self, worker: str, now_s: float) -> None:
        """Watch a worker that the broker reports as stalled, and kill it if it does not react in time.

        The broker has notified the worker. A hung worker exits by itself; a worker that has not started the task
        returns it. A worker that does neither within STALL_GRACE_S is killed.
        """
        for slot in self._scorers:
            if slot.worker == worker:
                slot.kill_at_s = min(slot.kill_at_s, now_s + STALL_GRACE_S)

    def observe(self, ended: Ended) -> None:
        """Record a finished task, which resets the count of deaths. Called by the broker in its thread."""
        if ended.completion.ok:
            for slot in self._scorers:
                if slot.worker == ended.completion.worker:
                    slot.worked = True
                    self._worked.add(slot.reward)

    def read_status(self, scorer: _Scorer) -> None:
        """Read the status line of a process when it is available. Raises RewardError if the worker failed to load."""
        assert scorer.process is not None
        assert scorer.process.stdout is not None
        line = scorer.process.stdout.readline()
        if not line.endswith(b"\n"):  # stdout was closed, perhaps within a line: the process is exiting
            self.selector.unregister(scorer.process.stdout)
            return
        status = json.loads(line)
        if "error" in status:
            self._cannot_load(scorer, status["error"])
        else:
            scorer.ready = True
            log.info("%s is ready (pid %d)", scorer.name, scorer.process.pid)

    def stop(self) -> None:
        """Stop all processes and their children: close stdin, kill after STOP_S. Blocks until all have exited."""
        running = [s.process for s in self._scorers if s.process is not None]
        for process in running:
            _close(process.stdin)
        deadline_s = time.monotonic() + STOP_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            _end(process)
        for slot in self._scorers:
            slot.process = None

    def kill(self) -> None:
        """Kill all processes immediately. Safe in a signal handler."""
        for slot in self._scorers:
            if slot.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(slot.process.pid, signal.SIGKILL)

    def _start(self, scorer: _Scorer, now_s: float) -> None:
        program = self.programs[scorer.reward]
        scorer.worker, scorer.ready, scorer.started_at_s = uuid.uuid4().hex, False, now_s
        scorer.starts, scorer.kill_at_s, scorer.worked = scorer.starts + 1, float("inf"), False
        scorer.asked = None
        settings = {
            "endpoint": self.hub.worker_endpoint,
            "worker": scorer.worker,
            "name": scorer.name,
            "kind": program.kind,
            **program.settings,
        }
        try:
            scorer.process = subprocess.Popen(
                [str(program.python or sys.executable), "-m", program.module],
                env=None if program.python is None else _with_our_packages(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that its children can be killed with it
            )
        except OSError as error:  # no such interpreter; no descriptors, processes or memory left
            if not self.all_were_ready:
                raise RewardError(f"{program.title} cannot start: {error}") from error
            log.error("%s cannot start: %s; next attempt in %.0f s", scorer.name, error, MAX_BACK_OFF_S)
            scorer.start_at_s = now_s + MAX_BACK_OFF_S
            return
        assert scorer.process.stdin is not None
        assert scorer.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # already dead; `supervise` reaps it
            scorer.process.stdin.write(json.dumps(settings).encode() + b"\n")
            scorer.process.stdin.flush()
        self.selector.register(scorer.process.stdout, selectors.EVENT_READ, lambda: self.read_status(scorer))

    def _hangs(self, scorer: _Scorer, now_s: float) -> bool:
        """Return True if a process still holds stalled work after STALL_GRACE_S.

        Queries the broker asynchronously: the first call only sends the request, a later call reads the reply.
        """
        request, scorer.asked = scorer.asked, None
        if request is None or not request.done():
            scorer.asked, scorer.kill_at_s = request or self.hub.status(), now_s + ANSWER_S
            return False
        idle_s = None if request.cancelled() else request.result().workers.get(scorer.worker)
        stalled_s = 0.0 if idle_s is None else idle_s - self.hub.kinds[self.programs[scorer.reward].kind].stall_s
        wait_s = STALL_GRACE_S - stalled_s
        scorer.kill_at_s = now_s + max(0.0, wait_s) if stalled_s > 0 else float("inf")
        return wait_s <= 0

    def _reap(self, scorer: _Scorer, now_s: float) -> None:
        process, scorer.process, scorer.ready = scorer.process, None, False
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(KeyError):  # already unregistered when stdout was closed
            self.selector.unregister(process.stdout)
        error = _unread_error(process.stdout)
        _end(process)
        if error is not None:
            self._cannot_load(scorer, error)
        cause = _cause(process.returncode)
        self.hub.worker_lost(scorer.worker, f"its worker died ({cause})")
        if not self.all_were_ready:
            raise RewardError(
                f"{self.programs[scorer.reward].title} cannot start: its worker died ({cause}) while loading"
            )
        if scorer.reward in self.down:
            return
        long_life = now_s - scorer.started_at_s > DEATHS_WINDOW_S
        scorer.quick_deaths = 1 if long_life or scorer.worked else scorer.quick_deaths + 1
        back_off_s = min(2.0 ** (scorer.quick_deaths - 1), MAX_BACK_OFF_S)
        scorer.start_at_s = now_s + back_off_s
        log.warning("%s died (%s); next start in %.0f s", scorer.name, cause, back_off_s)
        deaths = self._deaths[scorer.reward]
        if scorer.reward in self._worked:
            self._worked.discard(scorer.reward)
            deaths.clear()
        deaths.append(now_s)
        while now_s - deaths[0] > DEATHS_WINDOW_S:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            window = f"{DEATHS_WINDOW_S / 60:.0f} minutes"
            self._give_up(scorer.reward, f"its workers died {len(deaths)} times within {window}, last: {cause}")

    def _cannot_load(self, scorer: _Scorer, error: str) -> None:
        if not self.all_were_ready:
            raise RewardError(f"{self.programs[scorer.reward].title} cannot start: {error}")
        log.error("%s cannot load: %s", scorer.name, error)  # the process exits and is reaped as usual

    def _give_up(self, reward: str, reason: str) -> None:
        self.down[reward] = f"{self.programs[reward].title} is down: {reason}"
        log.error("%s", self.down[reward])
        self.hub.kind_down(self.programs[reward].kind, self.down[reward])
        for slot in self._scorers:
            if slot.reward == reward and slot.process is not None:
                _close(slot.process.stdin)


def _with_our_packages() -> dict[str, str]:
    """Return an environment in which another interpreter can import wfm_ds and wfm_reward without installing them."""
    roots = [str(Path(package.__path__[0]).parent) for package in (wfm_ds, wfm_reward)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def _cause(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _unread_error(status: IO[bytes]) -> str | None:
    """Return the unread error of a dead process from its status pipe, if any."""
    os.set_blocking(status.fileno(), False)  # its children may hold the other end open
    line = status.readline()
    if not line.endswith(b"\n"):  # it was killed while writing, or wrote nothing
        return None
    error = json.loads(line).get("error")
    return None if error is None else str(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its session, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
