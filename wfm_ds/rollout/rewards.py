"""Client of the reward service. It starts the service for a run, submits samples, and collects scores.

Rewards run in other processes, because a reward may hang, crash or need separate packages. Every sample gets a Score: a
finite number, or a failure with a reason.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml

from wfm_ds.distributed.gpus import find_machine_gpus, run_gpu_environment
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import RewardError
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.transport.arrays import pack_arrays
from wfm_ds.transport.client import PipeClient, TaskOutcome
from wfm_ds.transport.keys import KeyFileError, load_client_keys
from wfm_ds.transport.socket_folders import SocketFolder
from wfm_ds.transport.sockets import PipeError
from wfm_ds.transport.submission import submit_rows
from wfm_ds.types import MediaBatch, Score

log = logging.getLogger(__name__)

MAX_RUN_CHARS = 100  # of the run's name in the service's log
STOP_S = 20.0  # for the service to stop its workers
MAX_RESTARTS = 5
RESTARTS_WINDOW_S = 600.0
DEADLINE_SLACK_S = 10.0  # the client's own deadline expires first, with the more specific message


class RewardService:
    """Runs `wfm serve` for one recipe in a child process, and restarts the child when it dies.

    Rank 0 starts the service, and all ranks connect to `endpoint`. The child exits when this process exits.
    """

    def __init__(self, reward: RewardRecipe, folder: Path, num_ranks: int = 0) -> None:
        """Start the service and wait until all rewards are loaded.

        Writes reward_service.yaml, reward_service.log and pipes.json to `folder`. num_ranks: number of training ranks
        on this machine. Raises RewardError with the service's message if the service fails to start or is not ready
        within reward.start_timeout_s. Raises RecipeError if a GPU does not exist.
        """
        self._environment = service_environment(reward, num_ranks)
        self.endpoint = str(folder / "pipes.json")
        self._config_path = folder / "reward_service.yaml"
        self._log_path = folder / "reward_service.log"
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # prevents a restart after a call of `stop`
        self._sockets = SocketFolder()
        folder.mkdir(parents=True, exist_ok=True)
        Path(self.endpoint).unlink(missing_ok=True)
        self._config_path.write_text(yaml.safe_dump(build_service_config(reward, self._sockets.path), sort_keys=False))
        self._log_path.write_bytes(b"")
        self._process = self._start_process()
        try:
            self._wait_until_ready(reward.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch_process, name="reward service", daemon=True)
        self._watcher.start()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the service. A restart changes it."""
        return self._process.pid

    def stop(self) -> None:
        """Stop the service and its workers. Repeated calls are allowed."""
        with self._lock:
            self._stopping.set()
            process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # the service stops when its stdin is closed
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the reward service did not stop within %.0f s: killing it", STOP_S)
            process.kill()
            process.wait()
        self._sockets.remove()
        Path(self.endpoint).unlink(missing_ok=True)

    def _start_process(self) -> subprocess.Popen[bytes]:
        self._sockets.restore()
        with self._log_path.open("ab") as log_file:
            return subprocess.Popen(
                [sys.executable, "-m", "wfm_reward.serve", str(self._config_path), "--stop-on-eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=self._environment,
                start_new_session=True,  # keeps Ctrl-C from the service: the trainer needs it to finish its step
            )

    def _wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the service prints that it is ready.

        Raises RewardError if the service exits or is not ready in time.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RewardError(f"the reward service was not ready after {timeout_s:g} s (log: {self._log_path})")
            line = self._process.stdout.readline()
        if not line:
            raise RewardError(f"{self._last_error()} (log: {self._log_path})")

    def _last_error(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else f"the reward service exited with status {self._process.wait()}"

    def _watch_process(self) -> None:
        """Restart the service whenever it dies. Clients reconnect and submit their unfinished tasks again."""
        deaths: deque[float] = deque()
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            deaths.append(time.monotonic())
            while deaths[-1] - deaths[0] > RESTARTS_WINDOW_S:
                deaths.popleft()
            if len(deaths) > MAX_RESTARTS:
                log.error("the reward service died %d times: not restarting it", len(deaths))
                return
            log.warning("the reward service died (exit status %d): restarting it", status)
            self._stopping.wait(2.0 ** (len(deaths) - 1))
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = self._start_process()


def build_service_config(reward: RewardRecipe, sockets: Path) -> dict[str, Any]:
    """Return the content of reward_service.yaml. Raises RewardError for an unknown reward."""
    from wfm_reward import registry

    rewards = {
        # A worker without progress for reward.timeout_s can only produce timeouts.
        f.name: {
            "stall_s": min(registry.get_reward_class(f.name).stall_s, reward.timeout_s),
            **f.model_dump(include={"device", "workers", "max_batch", "options"}, exclude_none=True),
        }
        for f in reward.functions
    }
    return {"pipes": {"folder": str(sockets)}, "rewards": rewards}


def service_environment(reward: RewardRecipe, num_ranks: int) -> dict[str, str]:
    """Return the environment variables of the reward service.

    The service sees all GPUs of the run if any reward uses a GPU. num_ranks: number of training ranks on this machine.
    Raises RecipeError if a GPU does not exist. Logs a warning if a GPU is also used for training.
    """
    on_gpu = {f.name: f.device for f in reward.functions if f.uses_gpu}
    if not on_gpu:
        return dict(os.environ)
    gpus = find_machine_gpus(num_ranks)
    names = {name: gpus.visible_name(device, f"device of reward {name}") for name, device in on_gpu.items()}
    if shared := [f"{on_gpu[name]} ({name})" for name, gpu in names.items() if gpu in gpus.training_gpus]:
        log.warning(
            "reward devices: %s also used for training: rewards and training share the memory and slow each other down",
            ", ".join(shared),
        )
    return run_gpu_environment(os.environ)


@dataclass(frozen=True, slots=True)
class _RewardTask:
    """Samples submitted to the reward service for one reward."""

    reward: str
    sample_ids: tuple[str, ...]
    deadline_s: float  # on the clock of PipeClient.now_s


class RewardClient:
    """Submits samples for scoring and collects their scores. Each rank has one client. Not thread-safe."""

    def __init__(
        self, endpoint: str, reward: RewardRecipe, run: str, client: str, *, lost_after_s: float = 60.0
    ) -> None:
        """Connect to the reward service.

        endpoint: path of a pipes.json, or an ipc:// or tcp:// address.
        run, client: names that identify this client in the log of the service.
        lost_after_s: number of seconds of silence after which the service counts as lost and submitted tasks fail.
        Raises RewardError if the keys are unusable, if the service does not answer within reward.start_timeout_s, or if
        the service lacks a reward of the recipe or computes it with different options.
        """
        self._reward = reward
        self._lost_after_s = lost_after_s
        # Unique: the service treats tasks with equal ids as the same work, also across sessions of a run.
        self._client_id = f"{client}-{uuid.uuid4().hex[:12]}"
        self._num_submitted = 0
        self._pending_tasks: dict[str, _RewardTask] = {}
        self._scores: dict[str, dict[str, Score]] = {}
        try:
            # A unique client name: runs with equal folder names may share a service.
            keys = None if reward.keys is None else load_client_keys(Path(reward.keys))
            self._pipe = PipeClient(endpoint, run=run[:MAX_RUN_CHARS], client=self._client_id, keys=keys)
        except (PipeError, KeyFileError) as error:
            raise RewardError(f"reward service: {error}") from error
        try:
            self._pipe.attach(reward.start_timeout_s)
            self._max_batch = {f.name: self._require_reward(f) for f in reward.functions}
        except PipeError as error:
            self.close()
            raise RewardError(f"reward service: {error}") from error
        except RewardError:
            self.close()
            raise

    def submit(self, batch: MediaBatch) -> None:
        """Send a copy of the batch to the service, to be scored by all rewards. Does not wait for the scores."""
        media = np.array(batch.media)
        rows = [
            {"id": sample_id, "prompt": batch.prompts[i], "metadata": dict(batch.metadata[i]), "fps": batch.fps}
            | ({"inputs": pack_arrays(batch.inputs[i])} if batch.inputs and batch.inputs[i] else {})
            for i, sample_id in enumerate(batch.sample_ids)
        ]
        deadline_s = self._pipe.now_s() + self._reward.timeout_s
        max_rows = {f"score:{reward}": max_batch for reward, max_batch in self._max_batch.items()}
        for piece in submit_rows(
            self._pipe, rows, list(media), max_rows, self._new_task_id, deadline_s + DEADLINE_SLACK_S
        ):
            sample_ids = tuple(batch.sample_ids[piece.start : piece.stop])
            ticket = _RewardTask(piece.kind.removeprefix("score:"), sample_ids, deadline_s)
            if piece.failure is not None:
                self._fail_task(ticket, piece.failure)
            else:
                self._pending_tasks[piece.id] = ticket

    def wait(self) -> dict[str, dict[str, Score]]:
        """Wait for the scores of all samples submitted since the last call. Returns {sample id: {reward name: Score}}.

        Every sample has a Score for every reward. Failures and timeouts are failed Scores, not exceptions. The wait
        ends at the latest reward.timeout_s after the last submission.
        """
        while self._pending_tasks:
            LIVENESS.record_progress()
            for outcome in self._pipe.take_outcomes(self._poll_timeout_s()):
                self._record_outcome(outcome)
            self._fail_overdue(self._pipe.now_s())
            self._fail_if_lost()
        scores, self._scores = self._scores, {}
        return scores

    def close(self) -> None:
        """Cancel the pending tasks and disconnect."""
        self._pipe.close()

    def _require_reward(self, function: RewardFunction) -> int:
        """Return a reward's maximum batch size.

        Raises RewardError if the service does not have the reward or uses different options for it.
        """
        info = self._pipe.kinds.get(f"score:{function.name}")
        if info is None:
            offers = ", ".join(sorted(kind.removeprefix("score:") for kind in self._pipe.kinds))
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} does not offer {function.name} of the recipe; it offers "
                f"{offers}"
            )
        if not self._reward.spawn and function.options and function.options != info.get("options"):
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} computes {function.name} with the options "
                f"{info.get('options')}, but the recipe has {function.options}: change one of them"
            )
        return int(info["max_batch"])

    def _new_task_id(self, kind: str) -> str:
        self._num_submitted += 1
        return f"{self._client_id}/{self._num_submitted}#{kind.removeprefix('score:')}"

    def _poll_timeout_s(self) -> float:
        """Return the seconds until the next deadline, but at most 0.5. A lost service is then detected quickly."""
        return min(0.5, min(ticket.deadline_s for ticket in self._pending_tasks.values()) - self._pipe.now_s())

    def _record_outcome(self, outcome: TaskOutcome) -> None:
        ticket = self._pending_tasks.pop(outcome.id, None)
        if ticket is None:
            return  # already failed
        if not outcome.ok:
            self._fail_task(ticket, outcome.reason)
            return
        try:
            scores = list(_parse_scores(ticket, outcome))
        except (KeyError, TypeError, ValueError) as error:
            self._fail_task(ticket, f"malformed reply of the reward service: {error}")
            return
        for score in scores:
            self._scores.setdefault(score.sample_id, {})[score.reward] = score

    def _fail_overdue(self, now_s: float) -> None:
        silent_s = self._pipe.silence_s()
        cause = f" ({self._pipe.connection_problem()} for {silent_s:.0f} s)" if silent_s > 10 else ""
        overdue = {task_id: ticket for task_id, ticket in self._pending_tasks.items() if now_s >= ticket.deadline_s}
        for task_id, ticket in overdue.items():
            self._fail_task(ticket, f"timeout after {self._reward.timeout_s:g} s in {ticket.reward}{cause}")
            del self._pending_tasks[task_id]
        self._pipe.cancel(overdue)

    def _fail_if_lost(self) -> None:
        silent_s = self._pipe.silence_s()
        if silent_s > self._lost_after_s:
            for ticket in self._pending_tasks.values():
                self._fail_task(ticket, f"reward service lost: {self._pipe.connection_problem()} for {silent_s:.0f} s")
            self._pipe.cancel(self._pending_tasks)
            self._pending_tasks.clear()

    def _fail_task(self, task: _RewardTask, why: str) -> None:
        for sample_id in task.sample_ids:
            score = Score(sample_id=sample_id, reward=task.reward, failure=why)
            self._scores.setdefault(sample_id, {})[task.reward] = score


def _parse_scores(task: _RewardTask, outcome: TaskOutcome) -> Iterator[Score]:
    """Yield the scores in a reply of the reward service.

    Raises KeyError, TypeError or ValueError if a sample has no valid row.
    """
    rows = outcome.meta["scores"]
    seconds = outcome.seconds / len(task.sample_ids)
    for sample_id, (value, failure, parts) in zip(task.sample_ids, rows, strict=True):
        yield Score(sample_id=sample_id, reward=task.reward, value=value, failure=failure, seconds=seconds, parts=parts)
