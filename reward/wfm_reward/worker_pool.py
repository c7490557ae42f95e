"""Start, watch, restart and stop the worker processes of a reward service."""

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
from wfm_ds.program import block_job_signals
from wfm_ds.transport.broker import Broker
from wfm_ds.transport.tasks import BrokerStatus, FinishedTask
from wfm_reward import registry
from wfm_reward.config import DecoderConfig, RewardConfig

log = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATHS_WINDOW_S = 600.0
MAX_BACK_OFF_S = 60.0
STALL_GRACE_S = 5.0  # seconds for a hung worker to exit by itself and log its stacks
STATUS_WAIT_S = 0.2  # seconds for the broker to report the state of a worker
STOP_S = 3.0  # seconds for an idle process to exit after its stdin is closed


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """The command of worker processes, `python -m MODULE`, and the settings that they read from stdin."""

    title: str  # for messages, such as "reward ocr"
    kind: str  # kind of the tasks that it processes
    module: str
    settings: Mapping[str, Any]  # sent to the processes together with their address, id and name
    device: str
    workers: int
    python: Path | None = None


def reward_program(name: str, config: RewardConfig) -> WorkerProgram:
    settings = config.model_dump(include={"device", "options", "max_wait_ms"})
    settings["max_batch"] = registry.resolve_max_batch(name, config.max_batch)
    settings["stall_s"] = worker_stall_s(name, config)
    return WorkerProgram(
        f"reward {name}", f"score:{name}", "wfm_reward.worker", {"reward": name, **settings}, config.device,
        config.workers, config.python,
    )  # fmt: skip


def worker_stall_s(name: str, config: RewardConfig) -> float:
    return registry.get_reward_class(name).stall_s if config.stall_s is None else config.stall_s


def decoder_program(channels: int, config: DecoderConfig, folder: Path) -> WorkerProgram:
    """Return the program that decodes latents with `channels` channels to video files in `folder`."""
    settings = {**config.model_dump(), "channels": channels, "folder": str(folder.absolute())}
    title = f"latent decoder {channels}"
    return WorkerProgram(title, f"decode:{channels}", "wfm_reward.decoder", settings, config.device, 1)


@dataclass(slots=True)
class _WorkerSlot:
    """State of one worker of a reward or decoder. If its process dies, a new process continues in the same slot.

    `process` is None while no process runs.
    """

    reward: str
    name: str  # for messages, such as "ocr-0"
    process: subprocess.Popen[bytes] | None = None
    worker_id: str = ""  # id of the current process at the broker
    ready: bool = False
    started_at_s: float = 0.0
    start_at_s: float = 0.0  # earliest time of the next start
    kill_at_s: float = float("inf")  # earliest time to kill a stalled process
    status_request: Future[BrokerStatus] | None = None  # pending request for the state of a stalled process
    has_finished_task: bool = False  # by the current process
    quick_deaths: int = 0  # consecutive deaths without a finished task or long life
    starts: int = 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of one worker process, for the status page."""

    reward: str
    name: str
    worker_id: str
    pid: int | None
    device: str
    ready: bool
    restarts: int


@dataclass(slots=True)
class WorkerPool:
    """The worker processes of a reward service. The main loop calls `supervise`. Only the method `stop` blocks."""

    broker: Broker
    programs: dict[str, WorkerProgram]  # {name of the reward or decoder: program}
    selector: selectors.BaseSelector
    down_reasons: dict[str, str] = field(default_factory=dict)  # {disabled reward: reason}
    has_been_ready: bool = False
    _slots: list[_WorkerSlot] = field(default_factory=list)
    # {reward: times of deaths since its last finished task}
    _recent_deaths: dict[str, deque[float]] = field(default_factory=dict)
    _productive_rewards: set[str] = field(default_factory=set)  # rewards that finished a task since their last death

    def __post_init__(self) -> None:
        for name, program in self.programs.items():
            self._slots += [_WorkerSlot(name, f"{name}-{i}") for i in range(program.workers)]
            self._recent_deaths[name] = deque()

    def worker_states(self) -> list[WorkerState]:
        return [
            WorkerState(
                reward=s.reward,
                name=s.name,
                worker_id=s.worker_id,
                pid=process.pid if (process := s.process) else None,
                device=self.programs[s.reward].device,
                ready=s.ready,
                restarts=max(0, s.starts - 1),
            )
            for s in self._slots
        ]

    def unready_rewards(self) -> list[str]:
        return sorted({slot.reward for slot in self._slots if not slot.ready})

    def supervise(self, now_s: float) -> None:
        """Start processes that are due, kill stuck processes, and reap dead processes.

        Raises RewardError if a process fails before the service was ready for the first time.
        """
        for slot in self._slots:
            if slot.process is not None and now_s >= slot.kill_at_s and self._is_stuck(slot, now_s):
                log.error("%s makes no progress and does not exit (pid %d): killed", slot.name, slot.process.pid)
                _send_kill(slot.process)
                slot.process.wait()
            if slot.process is not None and slot.process.poll() is not None:
                self._reap_worker(slot, now_s)
            if slot.process is None and slot.reward not in self.down_reasons and now_s >= slot.start_at_s:
                self._start_worker(slot, now_s)
        self.has_been_ready = self.has_been_ready or not self.unready_rewards()

    def next_action_s(self, now_s: float) -> float:
        """Return the seconds until `supervise` must start or kill a process, or inf if nothing is scheduled."""
        planned = [s.start_at_s for s in self._slots if s.process is None and s.reward not in self.down_reasons]
        planned += [s.kill_at_s for s in self._slots if s.process is not None]
        return max(0.0, min(planned, default=float("inf")) - now_s)

    def watch_stalled_worker(self, worker_id: str, now_s: float) -> None:
        """Kill a worker that the broker reports as stalled, unless it reacts within STALL_GRACE_S."""
        for slot in self._slots:
            if slot.worker_id == worker_id:
                slot.kill_at_s = min(slot.kill_at_s, now_s + STALL_GRACE_S)

    def record_task(self, ended: FinishedTask) -> None:
        """Reset the count of deaths of the worker that finished this task. Called in the broker's thread."""
        if ended.completion.ok:
            for slot in self._slots:
                if slot.worker_id == ended.completion.worker:
                    slot.has_finished_task = True
                    self._productive_rewards.add(slot.reward)

    def read_status(self, slot: _WorkerSlot) -> None:
        """Read the status line of a process. Raises RewardError for an error before the service was first ready."""
        assert slot.process is not None
        assert slot.process.stdout is not None
        line = slot.process.stdout.readline()
        if not line.endswith(b"\n"):  # stdout was closed, perhaps within a line: the process is exiting
            self.selector.unregister(slot.process.stdout)
            return
        status = json.loads(line)
        if "error" in status:
            self._handle_load_error(slot, status["error"])
        else:
            slot.ready = True
            log.info("%s is ready (pid %d)", slot.name, slot.process.pid)

    def stop(self) -> None:
        """Stop all processes and their children: close their stdin, and kill them after STOP_S seconds."""
        running = [s.process for s in self._slots if s.process is not None]
        for process in running:
            _close_pipe(process.stdin)
        deadline_s = time.monotonic() + STOP_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
            _kill_session(process)
        for slot in self._slots:
            slot.process = None

    def kill(self) -> None:
        """Kill all processes immediately. Signal handlers may call this."""
        for slot in self._slots:
            if slot.process is not None:
                _send_kill(slot.process)

    def _start_worker(self, slot: _WorkerSlot, now_s: float) -> None:
        program = self.programs[slot.reward]
        slot.worker_id, slot.ready, slot.started_at_s = uuid.uuid4().hex, False, now_s
        slot.starts, slot.kill_at_s, slot.has_finished_task = slot.starts + 1, float("inf"), False
        slot.status_request = None
        settings = {
            "endpoint": self.broker.worker_endpoint,
            "worker": slot.worker_id,
            "name": slot.name,
            "kind": program.kind,
            **program.settings,
        }
        try:
            with block_job_signals():
                slot.process = subprocess.Popen(
                    [str(program.python or sys.executable), "-m", program.module],
                    env=None if program.python is None else _worker_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # to kill its children with it
                )
        except OSError as error:  # no interpreter; too few descriptors, processes or memory
            if not self.has_been_ready:
                raise RewardError(f"{program.title} cannot start: {error}") from error
            log.error("%s cannot start: %s; next attempt in %.0f s", slot.name, error, MAX_BACK_OFF_S)
            slot.start_at_s = now_s + MAX_BACK_OFF_S
            return
        assert slot.process.stdin is not None
        assert slot.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # already dead; `supervise` reaps it
            slot.process.stdin.write(json.dumps(settings).encode() + b"\n")
            slot.process.stdin.flush()
        self.selector.register(slot.process.stdout, selectors.EVENT_READ, lambda: self.read_status(slot))

    def _is_stuck(self, slot: _WorkerSlot, now_s: float) -> bool:
        """Return whether a process has been stalled for longer than STALL_GRACE_S. The first call returns False."""
        request, slot.status_request = slot.status_request, None
        if request is None or not request.done():
            slot.status_request, slot.kill_at_s = request or self.broker.request_status(), now_s + STATUS_WAIT_S
            return False
        idle_s = None if request.cancelled() else request.result().workers.get(slot.worker_id)
        stalled_s = 0.0 if idle_s is None else idle_s - self.broker.kinds[self.programs[slot.reward].kind].stall_s
        wait_s = STALL_GRACE_S - stalled_s
        slot.kill_at_s = now_s + max(0.0, wait_s) if stalled_s > 0 else float("inf")
        return wait_s <= 0

    def _reap_worker(self, slot: _WorkerSlot, now_s: float) -> None:
        process, slot.process, slot.ready = slot.process, None, False
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(KeyError):  # already unregistered by read_status
            self.selector.unregister(process.stdout)
        error = _read_pending_error(process.stdout)
        _kill_session(process)
        if error is not None:
            self._handle_load_error(slot, error)
        cause = _exit_cause(process.returncode)
        self.broker.report_lost_worker(slot.worker_id, f"its worker died ({cause})")
        if not self.has_been_ready:
            raise RewardError(
                f"{self.programs[slot.reward].title} cannot start: its worker died ({cause}) while loading"
            )
        if slot.reward in self.down_reasons:
            return
        long_life = now_s - slot.started_at_s > DEATHS_WINDOW_S
        slot.quick_deaths = 1 if long_life or slot.has_finished_task else slot.quick_deaths + 1
        back_off_s = min(2.0 ** (slot.quick_deaths - 1), MAX_BACK_OFF_S)
        slot.start_at_s = now_s + back_off_s
        log.warning("%s died (%s); next start in %.0f s", slot.name, cause, back_off_s)
        deaths = self._recent_deaths[slot.reward]
        if slot.reward in self._productive_rewards:
            self._productive_rewards.discard(slot.reward)
            deaths.clear()
        deaths.append(now_s)
        while now_s - deaths[0] > DEATHS_WINDOW_S:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            window = f"{DEATHS_WINDOW_S / 60:.0f} minutes"
            self._disable_reward(slot.reward, f"its workers died {len(deaths)} times within {window}, last: {cause}")

    def _handle_load_error(self, slot: _WorkerSlot, error: str) -> None:
        if not self.has_been_ready:
            raise RewardError(f"{self.programs[slot.reward].title} cannot start: {error}")
        log.error("%s cannot load: %s", slot.name, error)  # the process exits and is reaped by `supervise`

    def _disable_reward(self, reward: str, reason: str) -> None:
        self.down_reasons[reward] = f"{self.programs[reward].title} is down: {reason}"
        log.error("%s", self.down_reasons[reward])
        self.broker.disable_kind(self.programs[reward].kind, self.down_reasons[reward])
        for slot in self._slots:
            if slot.reward == reward and slot.process is not None:
                _close_pipe(slot.process.stdin)


def _worker_environment() -> dict[str, str]:
    roots = [str(Path(package.__path__[0]).parent) for package in (wfm_ds, wfm_reward)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def _exit_cause(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _read_pending_error(status: IO[bytes]) -> str | None:
    os.set_blocking(status.fileno(), False)  # children may hold the other end open
    line = status.readline()
    if not line.endswith(b"\n"):  # killed while writing, or wrote nothing
        return None
    error = json.loads(line).get("error")
    return None if error is None else str(error)


def _send_kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(PermissionError):
        _send_kill(process)
    process.wait()
    _close_pipe(process.stdin)
    _close_pipe(process.stdout)


def _close_pipe(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
