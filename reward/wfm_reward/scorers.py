"""The worker processes of a service, scorers and decoders: started, watched, restarted with back-off, ended."""

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
STALL_GRACE_S = 5.0  # for a worker that hangs to end by itself and leave its stacks in the log
ANSWER_S = 0.2  # for the hub to say how a worker does
STOP_S = 3.0  # for an idle process to leave after its stdin is closed


@dataclass(frozen=True, slots=True)
class Program:
    """The command of `workers` processes: `python -m MODULE`, with its settings as JSON on stdin."""

    title: str  # for people: reward ocr
    kind: str  # of the tasks that it does
    module: str
    settings: Mapping[str, Any]  # beside those that every worker gets
    device: str
    workers: int
    python: Path | None = None


def scorer(name: str, config: RewardConfig) -> Program:
    """The program that computes a reward."""
    settings = config.model_dump(include={"device", "options", "max_batch", "max_wait_ms"})
    settings["stall_s"] = stall_s(name, config)
    return Program(
        f"reward {name}", f"score:{name}", "wfm_reward.worker", {"reward": name, **settings}, config.device,
        config.workers, config.python,
    )  # fmt: skip


def stall_s(name: str, config: RewardConfig) -> float:
    """Return the configuration's limit, else the reward's own."""
    return registry.describe(name).stall_s if config.stall_s is None else config.stall_s


def decoder(channels: int, config: DecoderConfig, folder: Path) -> Program:
    """The program that makes videos of latents with this many channels, in files of that folder."""
    settings = {**config.model_dump(), "channels": channels, "folder": str(folder.absolute())}
    title = f"latent decoder {channels}"
    return Program(title, f"decode:{channels}", "wfm_reward.decoder", settings, config.device, 1)


@dataclass(slots=True)
class _Scorer:
    """One place in the pool and the process that fills it, if any."""

    reward: str
    name: str  # for people: ocr-0
    process: subprocess.Popen[bytes] | None = None
    worker: str = ""  # the process's id towards the hub; each process has its own
    ready: bool = False
    started_at_s: float = 0.0
    start_at_s: float = 0.0  # not before
    kill_at_s: float = float("inf")  # its process has stalled: not before, and if it still has
    asked: Future[HubStatus] | None = None  # whether it still has
    worked: bool = False  # its process has finished a task
    quick_deaths: int = 0  # in a row
    starts: int = 0


@dataclass(frozen=True, slots=True)
class ScorerState:
    """One place in the pool, for people."""

    reward: str
    name: str
    worker: str
    pid: int | None
    device: str
    ready: bool
    restarts: int


@dataclass(slots=True)
class Scorers:
    """`workers` processes per reward. The supervisor's loop calls `supervise`; nothing here waits except `stop`."""

    hub: Hub
    programs: dict[str, Program]  # by the name of the reward, or of the decoder
    selector: selectors.BaseSelector
    down: dict[str, str] = field(default_factory=dict)  # by reward: why
    all_were_ready: bool = False
    _scorers: list[_Scorer] = field(default_factory=list)
    _deaths: dict[str, deque[float]] = field(default_factory=dict)  # since its last task was finished
    _worked: set[str] = field(default_factory=set)  # rewards with a finished task since their last death

    def __post_init__(self) -> None:
        for name, program in self.programs.items():
            self._scorers += [_Scorer(name, f"{name}-{i}") for i in range(program.workers)]
            self._deaths[name] = deque()

    def states(self) -> list[ScorerState]:
        """Return all places of the pool. Any thread may call it."""
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
        """Names of the rewards that have a process which is not ready yet."""
        return sorted({scorer.reward for scorer in self._scorers if not scorer.ready})

    def supervise(self, now_s: float) -> None:
        """Start what is due, reap what has died. Raises RewardError if a reward cannot even start."""
        for scorer in self._scorers:
            if scorer.process is not None and now_s >= scorer.kill_at_s and self._hangs(scorer, now_s):
                log.error("%s neither works nor ends (pid %d): killed", scorer.name, scorer.process.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(scorer.process.pid, signal.SIGKILL)
                scorer.process.wait()
            if scorer.process is not None and scorer.process.poll() is not None:
                self._reap(scorer, now_s)
            if scorer.process is None and scorer.reward not in self.down and now_s >= scorer.start_at_s:
                self._start(scorer, now_s)
        self.all_were_ready = self.all_were_ready or not self.waiting_for()

    def next_start_s(self, now_s: float) -> float:
        """Seconds until `supervise` has something to start or to kill, inf if nothing is planned."""
        planned = [s.start_at_s for s in self._scorers if s.process is None and s.reward not in self.down]
        planned += [s.kill_at_s for s in self._scorers if s.process is not None]
        return max(0.0, min(planned, default=float("inf")) - now_s)

    def stalled(self, worker: str, now_s: float) -> None:
        """Watch a worker that, says the hub, hangs or never got its task. It has been told so: one that hangs ends, one
        that has not begun the task hands it back. One that does neither for a while is stopped, and is killed."""
        for scorer in self._scorers:
            if scorer.worker == worker:
                scorer.kill_at_s = min(scorer.kill_at_s, now_s + STALL_GRACE_S)

    def observe(self, ended: Ended) -> None:
        """Take note of a task that ended; called by Hub in its thread. What is done makes earlier deaths forgotten."""
        if ended.completion.ok:
            for scorer in self._scorers:
                if scorer.worker == ended.completion.worker:
                    scorer.worked = True
                    self._worked.add(scorer.reward)

    def read_status(self, scorer: _Scorer) -> None:
        """Read the status of a process, which the selector says is there. Raises RewardError if it could not load."""
        assert scorer.process is not None
        assert scorer.process.stdout is not None
        line = scorer.process.stdout.readline()
        if not line.endswith(b"\n"):  # it has closed its stdout, perhaps in the middle of a line: it ends
            self.selector.unregister(scorer.process.stdout)
            return
        status = json.loads(line)
        if "error" in status:
            self._cannot_load(scorer, status["error"])
        else:
            scorer.ready = True
            log.info("%s is ready (pid %d)", scorer.name, scorer.process.pid)

    def stop(self) -> None:
        """End all processes and what they have started: asked first, forced after STOP_S. Returns when all are gone."""
        running = [s.process for s in self._scorers if s.process is not None]
        for process in running:
            _close(process.stdin)
        deadline_s = time.monotonic() + STOP_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            _end(process)
        for scorer in self._scorers:
            scorer.process = None

    def kill(self) -> None:
        """End all processes at once; for a signal handler."""
        for scorer in self._scorers:
            if scorer.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(scorer.process.pid, signal.SIGKILL)

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
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except OSError as error:  # no such Python; no descriptors, processes or memory left
            if not self.all_were_ready:
                raise RewardError(f"{program.title} cannot start: {error}") from error
            log.error("%s cannot start: %s; next attempt in %.0f s", scorer.name, error, MAX_BACK_OFF_S)
            scorer.start_at_s = now_s + MAX_BACK_OFF_S
            return
        assert scorer.process.stdin is not None
        assert scorer.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and reaped in the next turn
            scorer.process.stdin.write(json.dumps(settings).encode() + b"\n")
            scorer.process.stdin.flush()
        self.selector.register(scorer.process.stdout, selectors.EVENT_READ, lambda: self.read_status(scorer))

    def _hangs(self, scorer: _Scorer, now_s: float) -> bool:
        """Return True for a process that has had STALL_GRACE_S to hand back stalled work, and still has it.

        The hub knows: it is asked, and its answer is read in a later turn.
        """
        asked, scorer.asked = scorer.asked, None
        if asked is None or not asked.done():
            scorer.asked, scorer.kill_at_s = asked or self.hub.status(), now_s + ANSWER_S
            return False
        idle_s = None if asked.cancelled() else asked.result().workers.get(scorer.worker)
        stalled_s = 0.0 if idle_s is None else idle_s - self.hub.kinds[self.programs[scorer.reward].kind].stall_s
        wait_s = STALL_GRACE_S - stalled_s
        scorer.kill_at_s = now_s + max(0.0, wait_s) if stalled_s > 0 else float("inf")
        return wait_s <= 0

    def _reap(self, scorer: _Scorer, now_s: float) -> None:
        process, scorer.process, scorer.ready = scorer.process, None, False
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(KeyError):  # unregistered when it closed its stdout
            self.selector.unregister(process.stdout)
        error = _unread_error(process.stdout)
        _end(process)
        if error is not None:
            self._cannot_load(scorer, error)
        why = _cause(process.returncode)
        self.hub.worker_lost(scorer.worker, f"its worker died ({why})")
        if not self.all_were_ready:
            raise RewardError(
                f"{self.programs[scorer.reward].title} cannot start: its worker died ({why}) while loading"
            )
        if scorer.reward in self.down:
            return
        long_life = now_s - scorer.started_at_s > DEATHS_WINDOW_S
        scorer.quick_deaths = 1 if long_life or scorer.worked else scorer.quick_deaths + 1
        back_off_s = min(2.0 ** (scorer.quick_deaths - 1), MAX_BACK_OFF_S)
        scorer.start_at_s = now_s + back_off_s
        log.warning("%s died (%s); next start in %.0f s", scorer.name, why, back_off_s)
        deaths = self._deaths[scorer.reward]
        if scorer.reward in self._worked:
            self._worked.discard(scorer.reward)
            deaths.clear()
        deaths.append(now_s)
        while now_s - deaths[0] > DEATHS_WINDOW_S:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            window = f"{DEATHS_WINDOW_S / 60:.0f} minutes"
            self._give_up(scorer.reward, f"its workers died {len(deaths)} times within {window}, last: {why}")

    def _cannot_load(self, scorer: _Scorer, error: str) -> None:
        if not self.all_were_ready:
            raise RewardError(f"{self.programs[scorer.reward].title} cannot start: {error}")
        log.error("%s cannot load: %s", scorer.name, error)  # it ends now, and is reaped like any other

    def _give_up(self, reward: str, why: str) -> None:
        self.down[reward] = f"{self.programs[reward].title} is down: {why}"
        log.error("%s", self.down[reward])
        self.hub.kind_down(self.programs[reward].kind, self.down[reward])
        for scorer in self._scorers:
            if scorer.reward == reward and scorer.process is not None:
                _close(scorer.process.stdin)


def _with_our_packages() -> dict[str, str]:
    """The environment in which another Python finds wfm_ds and wfm_reward, which need not be installed in it."""
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
    """The error that a dead process left in its status, if nobody has read it yet."""
    os.set_blocking(status.fileno(), False)  # what it has forked may hold the other end open
    line = status.readline()
    if not line.endswith(b"\n"):  # it was killed while it wrote, or wrote nothing
        return None
    error = json.loads(line).get("error")
    return None if error is None else str(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, if it lives, and everything in its session; reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _close(process.stdin)
    _close(process.stdout)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
