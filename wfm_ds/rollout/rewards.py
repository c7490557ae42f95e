"""Rewards of generated media: starting the reward service for a run, and asking it.

Rewards are computed in other processes, so that a reward may hang, crash or need its own packages; this module only
knows their names, and turns every outcome into a Score: a finite number, or a named failure.
"""

from __future__ import annotations

import logging
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

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import RewardError
from wfm_ds.pipes.arrays import pack_arrays
from wfm_ds.pipes.client import PipeClient, TaskOutcome
from wfm_ds.pipes.folders import SocketFolder
from wfm_ds.pipes.keys import KeyFileError, client_keys
from wfm_ds.pipes.sockets import PipeError
from wfm_ds.pipes.submission import submit_in_pieces
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import MediaBatch, Score

log = logging.getLogger(__name__)

MAX_RUN_CHARS = 100  # for people who read the service's log
STALL_S = 120.0  # without progress, before a worker of a reward of the user's own is replaced
STOP_S = 20.0  # for a service to end its scorers
MAX_RESTARTS = 5
RESTARTS_WINDOW_S = 600.0
DEADLINE_SLACK_S = 10.0  # the client's own deadline comes first, and has the better words


class RewardService:
    """`python -m wfm_reward.serve` for one recipe, as a child of this process; restarted when it dies.

    One process of a run (rank 0) has it; all ranks connect to `endpoint`. The child ends when this process does.
    """

    def __init__(self, reward: RewardRecipe, folder: Path) -> None:
        """Start it and wait until all rewards are loaded.

        `folder` gets reward_service.yaml, reward_service.log and pipes.json. Raises RewardError with the service's own
        sentence if it cannot start, or is not ready within reward.start_timeout_s.
        """
        self.endpoint = str(folder / "pipes.json")
        self._config = folder / "reward_service.yaml"
        self._log = folder / "reward_service.log"
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # nothing is restarted once `stop` has begun
        self._sockets = SocketFolder()
        folder.mkdir(parents=True, exist_ok=True)
        Path(self.endpoint).unlink(missing_ok=True)
        self._config.write_text(yaml.safe_dump(service_config(reward, self._sockets.path), sort_keys=False))
        self._log.write_bytes(b"")
        self._process = self._started()
        try:
            self._wait_until_ready(reward.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="reward service", daemon=True)
        self._watcher.start()

    def __enter__(self) -> RewardService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the service; another one after a restart."""
        return self._process.pid

    def stop(self) -> None:
        """End the service and everything it started. May be called again."""
        with self._lock:
            self._stopping.set()
            process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # the end of its stdin tells it to stop
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the reward service did not stop within %.0f s and is killed", STOP_S)
            process.kill()
            process.wait()
        self._sockets.remove()
        Path(self.endpoint).unlink(missing_ok=True)

    def _started(self) -> subprocess.Popen[bytes]:
        self._sockets.restore()
        with self._log.open("ab") as log_file:
            return subprocess.Popen(
                [sys.executable, "-m", "wfm_reward.serve", str(self._config), "--stop-on-eof"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C is for the trainer, which still needs the service while it ends a step
            )

    def _wait_until_ready(self, timeout_s: float) -> None:
        """The service writes one line to stdout when it is ready, and closes it when it ends."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise RewardError(f"the reward service is not ready after {timeout_s:g} s; its log is {self._log}")
            line = self._process.stdout.readline()
        if not line:
            raise RewardError(f"{self._last_error()} (log: {self._log})")

    def _last_error(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else f"the reward service ended with exit status {self._process.wait()}"

    def _watch(self) -> None:
        """Restart the service when it dies; clients find the new one and submit again what has no answer."""
        deaths: deque[float] = deque()
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            deaths.append(time.monotonic())
            while deaths[-1] - deaths[0] > RESTARTS_WINDOW_S:
                deaths.popleft()
            if len(deaths) > MAX_RESTARTS:
                log.error("the reward service died %d times; it is not started again", len(deaths))
                return
            log.warning("the reward service died (exit status %d) and is started again", status)
            self._stopping.wait(2.0 ** (len(deaths) - 1))
            with self._lock:
                if self._stopping.is_set():
                    return
                self._process = self._started()


def service_config(reward: RewardRecipe, sockets: Path) -> dict[str, Any]:
    """The configuration that serves exactly this recipe, with its sockets in that folder. Raises RewardError for an
    unknown reward."""
    rewards = {
        # A worker without progress for longer than reward.timeout_s is of no use to this run.
        f.name: {
            "stall_s": min(_stall_s(f.name), reward.timeout_s),
            **f.model_dump(include={"workers", "max_batch", "options"}),
        }
        for f in reward.functions
    }
    return {"pipes": {"folder": str(sockets)}, "rewards": rewards}


def _stall_s(name: str) -> float:
    """The reward's own limit; a class of the user's is not imported here to ask for it."""
    from wfm_reward import registry

    return STALL_S if registry.is_path(name) else registry.describe(name).stall_s


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A task under way: which samples get which reward, until when."""

    reward: str
    sample_ids: tuple[str, ...]
    deadline_s: float  # on PipeClient.now_s


class RewardClient:
    """Submit media, go on denoising, collect scores. One per rank; its methods are for one thread."""

    def __init__(
        self, endpoint: str, reward: RewardRecipe, run: str, client: str, *, lost_after_s: float = 60.0
    ) -> None:
        """`endpoint`: path of a pipes.json, ipc:// or tcp://; (run, client) names this submitter at the service.

        Raises RewardError if the recipe's keys cannot be used, nobody answers within reward.start_timeout_s, or the
        service does not offer a reward that the recipe names, or computes it with other options. A service that stays
        silent for lost_after_s fails what is submitted.
        """
        self._reward = reward
        self._lost_after_s = lost_after_s
        self._token = f"{client}-{uuid.uuid4().hex[:12]}"  # equal ids mean equal work: never those of another life
        self._num_submitted = 0
        self._tickets: dict[str, _Ticket] = {}
        self._scores: dict[str, dict[str, Score]] = {}
        try:
            # The token: runs whose folders have the same name may share a service.
            keys = None if reward.keys is None else client_keys(Path(reward.keys))
            self._pipe = PipeClient(endpoint, run=run[:MAX_RUN_CHARS], client=self._token, keys=keys)
        except (PipeError, KeyFileError) as error:
            raise RewardError(f"reward service: {error}") from error
        try:
            self._pipe.attach(reward.start_timeout_s)
            self._max_batch = {f.name: self._offered(f) for f in reward.functions}
        except PipeError as error:
            self.close()
            raise RewardError(f"reward service: {error}") from error
        except RewardError:
            self.close()
            raise

    def submit(self, batch: MediaBatch) -> None:
        """Send the batch to all rewards and return at once. Its media are copied; each travels once for all rewards."""
        media = np.array(batch.media)
        rows = [
            {"id": sample_id, "prompt": batch.prompts[i], "metadata": dict(batch.metadata[i]), "fps": batch.fps}
            | ({"inputs": pack_arrays(batch.inputs[i])} if batch.inputs and batch.inputs[i] else {})
            for i, sample_id in enumerate(batch.sample_ids)
        ]
        deadline_s = self._pipe.now_s() + self._reward.timeout_s
        max_rows = {f"score:{reward}": max_batch for reward, max_batch in self._max_batch.items()}
        for piece in submit_in_pieces(
            self._pipe, rows, list(media), max_rows, self._new_id, deadline_s + DEADLINE_SLACK_S
        ):
            sample_ids = tuple(batch.sample_ids[piece.start : piece.stop])
            ticket = _Ticket(piece.kind.removeprefix("score:"), sample_ids, deadline_s)
            if piece.failure is not None:
                self._fail(ticket, piece.failure)
            else:
                self._tickets[piece.id] = ticket

    def wait(self) -> dict[str, dict[str, Score]]:
        """The scores of all samples submitted since the last call: {sample id: {reward name: Score}}.

        Every sample has a Score for every function. Returns when all are there, or failed: at the latest
        reward.timeout_s after the last submission. Never raises for what the service does.
        """
        while self._tickets:
            LIVENESS.advance()
            for outcome in self._pipe.take(self._patience_s()):
                self._book(outcome)
            self._fail_overdue(self._pipe.now_s())
            self._fail_if_lost()
        scores, self._scores = self._scores, {}
        return scores

    def close(self) -> None:
        """Cancel what is under way and disconnect."""
        self._pipe.close()

    def _offered(self, function: RewardFunction) -> int:
        """The max_batch of a reward at the service. Raises RewardError if the service does not compute it so."""
        info = self._pipe.kinds.get(f"score:{function.name}")
        if info is None:
            offers = ", ".join(sorted(kind.removeprefix("score:") for kind in self._pipe.kinds))
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} does not compute {function.name}, which the recipe "
                f"names; it offers {offers}"
            )
        if not self._reward.spawn and function.options and function.options != info.get("options"):
            raise RewardError(
                f"the reward service at {self._pipe.endpoint} computes {function.name} with the options "
                f"{info.get('options')}, the recipe says {function.options}: change one of them"
            )
        return int(info["max_batch"])

    def _new_id(self, kind: str) -> str:
        self._num_submitted += 1
        return f"{self._token}/{self._num_submitted}#{kind.removeprefix('score:')}"

    def _patience_s(self) -> float:
        """Seconds until the next deadline; at most half a second, to notice a lost service."""
        return min(0.5, min(ticket.deadline_s for ticket in self._tickets.values()) - self._pipe.now_s())

    def _book(self, outcome: TaskOutcome) -> None:
        ticket = self._tickets.pop(outcome.id, None)
        if ticket is None:
            return  # given up already
        if not outcome.ok:
            self._fail(ticket, outcome.reason)
            return
        try:
            scores = list(_scores(ticket, outcome))
        except (KeyError, TypeError, ValueError) as error:
            self._fail(ticket, f"the service's answer cannot be read: {error}")
            return
        for score in scores:
            self._scores.setdefault(score.sample_id, {})[score.reward] = score

    def _fail_overdue(self, now_s: float) -> None:
        silent_s = self._pipe.silent_s()
        cause = f" ({self._pipe.trouble()} for {silent_s:.0f} s)" if silent_s > 10 else ""
        overdue = {task_id: ticket for task_id, ticket in self._tickets.items() if now_s >= ticket.deadline_s}
        for task_id, ticket in overdue.items():
            self._fail(ticket, f"timeout after {self._reward.timeout_s:g} s in {ticket.reward}{cause}")
            del self._tickets[task_id]
        self._pipe.cancel(overdue)

    def _fail_if_lost(self) -> None:
        silent_s = self._pipe.silent_s()
        if silent_s > self._lost_after_s:
            for ticket in self._tickets.values():
                self._fail(ticket, f"reward service lost: {self._pipe.trouble()} for {silent_s:.0f} s")
            self._pipe.cancel(self._tickets)
            self._tickets.clear()

    def _fail(self, ticket: _Ticket, why: str) -> None:
        for sample_id in ticket.sample_ids:
            score = Score(sample_id=sample_id, reward=ticket.reward, failure=why)
            self._scores.setdefault(sample_id, {})[ticket.reward] = score


def _scores(ticket: _Ticket, outcome: TaskOutcome) -> Iterator[Score]:
    """Raises KeyError, TypeError or ValueError unless the answer is one [value, failure, parts] per sample."""
    answers = outcome.meta["scores"]
    seconds = outcome.seconds / len(ticket.sample_ids)
    for sample_id, (value, failure, parts) in zip(ticket.sample_ids, answers, strict=True):
        yield Score(
            sample_id=sample_id, reward=ticket.reward, value=value, failure=failure, seconds=seconds, parts=parts
        )
