"""Shutdown of a run, as nested contexts.

    with watch_ranks(world, ...) as shutdown:             if one rank fails, all ranks exit with its exit code
        with shutdown.use_recorder(discard_new_run(...)): a failure before training deletes the files of a new run
            with record_run(shutdown, ...) as record:     a failure during training is written to result.json

Only the first failure is recorded, on rank 0, by the innermost active context.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from wfm_ds.distributed import lifecycle
from wfm_ds.distributed.heartbeat import Heartbeat, is_communication_error, start_heartbeat
from wfm_ds.distributed.world import World
from wfm_ds.errors import RunError, UserError
from wfm_ds.monitoring.run_page import try_write_page
from wfm_ds.program import USER_ERROR_CODE
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.layout import RESULT_FILE, REWARD, ROLLOUT
from wfm_ds.runs.mirror import Mirror
from wfm_ds.runs.output_folder import RunStart, clear_run
from wfm_ds.runs.storage_copies import StorageCopies, finish_copies, send_result
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

log = logging.getLogger(__name__)

SINGLE_RANK_ERROR = "error: "  # prefix of a UserError that only one rank has, as sent to the other ranks


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a training loop. The status `preempted` means that a stop request ended the run after a step."""

    status: Literal["finished", "preempted"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    message: str = ""  # warning about the result


class RunProgress(Protocol):
    """Attributes of a training loop that are written to result.json."""

    step: int  # last completed step
    metrics: Mapping[str, float]  # of the last completed step


class RunExports(Protocol):
    @property
    def artifacts(self) -> Mapping[str, str]:
        """Exported folders as {kind: path}."""
        ...

    def finish_push(self) -> None:
        """Wait for uploads to the Hub. All ranks must call this."""


@dataclass(frozen=True, slots=True)
class ErrorCause:
    """Error that ended a run, as agreed by all ranks."""

    message: str
    is_reported_here: bool  # whether this rank prints it


class RunShutdown:
    """Makes all ranks agree on the error that ends a run, and records this error."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.start_time = datetime.datetime.now(datetime.UTC)
        self.exit_code = 1  # exit code if an error ends the run
        self.heartbeat: Heartbeat | None = None  # None in a run with one rank
        self._cause: ErrorCause | None = None
        self._recorders: list[Callable[[str], None]] = []  # recorders of the active contexts, innermost last
        self._record_lock, self._is_recorded = threading.Lock(), False

    @contextmanager
    def use_recorder(self, record: Callable[[str], None]) -> Iterator[None]:
        """Call `record(message)` on rank 0 if the block fails. Recorders of outer contexts are not called."""
        self._recorders.append(record)
        try:
            yield
        except Exception as error:
            self._record_failure(self.agree_on_cause(error).message)
            raise
        finally:
            self._recorders.pop()

    def agree_on_cause(self, error: Exception) -> ErrorCause:
        """Report the error to the other ranks and return the agreed cause. Later calls return this cause again."""
        if self._cause is None:
            self._cause = self._find_cause(error)
        return self._cause

    def handle_fault(self, text: str) -> None:
        """Log and record the failure of a rank. The heartbeat thread calls this if the main thread hangs."""
        if f" failed: {SINGLE_RANK_ERROR}" in text:
            self.exit_code = USER_ERROR_CODE
        log.error("the run ends: %s", text)
        if not self.world.is_main and self.world.local_rank == 0:  # one message per machine; rank 0 logs
            os.write(2, f"rank {self.world.rank}: the run ends: {text}\n".encode())
        self._record_failure(text)

    def _find_cause(self, error: Exception) -> ErrorCause:
        heartbeat, rank = self.heartbeat, self.world.rank
        if is_shared_error(error, self.world):
            if heartbeat is not None:
                heartbeat.stop()
            return ErrorCause(str(error), is_reported_here=self.world.is_main)
        if isinstance(error, UserError):  # the other ranks wait in a collective; the heartbeat ends them
            self.exit_code = USER_ERROR_CODE
            message = f"{SINGLE_RANK_ERROR}{error}"
            fault = None if heartbeat is None else heartbeat.report_failure(message, is_secondary=False)
            return ErrorCause(str(error), is_reported_here=fault is None or rank in fault.ranks)
        message, is_secondary = f"{type(error).__name__}: {error}", is_communication_error(error)
        fault = None if heartbeat is None else heartbeat.report_failure(message, is_secondary=is_secondary)
        if fault is None or not is_secondary:
            return ErrorCause(message, is_reported_here=True)
        self.handle_fault(fault.text)
        log.error("rank %d: resulting error: %s", rank, message)
        if rank in fault.ranks:  # the collective failed on this rank
            traceback.print_exception(error)
        return ErrorCause(fault.text, is_reported_here=False)

    def ignore_later_failures(self) -> None:
        with self._record_lock:
            self._is_recorded = True

    def _record_failure(self, message: str) -> None:
        with self._record_lock:
            if self.world.is_main and self._recorders and not self._is_recorded:
                self._is_recorded = True
                self._recorders[-1](message)


def is_shared_error(error: Exception, world: World) -> bool:
    """Return whether all ranks have raised this error. Collectives still work after a shared error."""
    return isinstance(error, (RunError, UserError)) and (error.agreed or world.size == 1)


@contextmanager
def watch_ranks(world: World, *, stuck_s: float) -> Iterator[RunShutdown]:
    """End all ranks if the block raises an error on one rank. All ranks must call this.

    UserError, RunError and errors of other ranks become SystemExit with the run's exit code. Unexpected errors of this
    rank are raised unchanged. stuck_s: end the run if no rank makes progress for this many seconds.
    """
    ending = RunShutdown(world)
    try:
        # All ranks exit with the code of the faulty rank, because the launcher reports the first exit code that it
        # sees.
        ending.heartbeat = start_heartbeat(
            world, stuck_s=stuck_s, on_end=ending.handle_fault, exit_process=lambda _: os._exit(ending.exit_code)
        )
        yield ending
    except UserError as error:
        lifecycle.exit_with_user_error(str(error), prints=ending.agree_on_cause(error).is_reported_here)
    except RunError as error:
        log.error("%s", ending.agree_on_cause(error).message)
        raise SystemExit(1) from error
    except Exception as error:
        if ending.agree_on_cause(error).is_reported_here:
            raise
        raise SystemExit(ending.exit_code) from error
    if ending.heartbeat is not None:
        ending.heartbeat.stop()


def discard_new_run(folder: Path, start: RunStart) -> Callable[[str], None]:
    """Return a recorder (see `use_recorder`) for failures before training. It deletes the files of a new run.

    The folders with the logs of the reward service and the rollout workers are kept.
    """

    def record(message: str) -> None:
        if start.is_new:
            clear_run(folder, keep=[REWARD, ROLLOUT])  # the message may refer to their logs

    return record


class ResultRecorder:
    """Writes result.json on rank 0 when the run ends. All ranks create it when the training loop starts."""

    def __init__(
        self, recipe: Recipe, ending: RunShutdown, mirror: Mirror | None, loop: RunProgress, exporter: RunExports
    ) -> None:
        self._recipe, self._ending, self._mirror = recipe, ending, mirror
        self._loop, self._exporter = loop, exporter
        self._copies: StorageCopies | None = None  # set after waiting for them

    def record_outcome(self, outcome: RunOutcome) -> StorageCopies | None:
        """Wait for the uploads to checkpoint.storage, then write result.json. Call it after a successful run.

        All ranks must call this. Returns which files are missing in S3, or None if checkpoint.storage is not set.
        Raises UserError if result.json cannot be written.
        """
        self.wait_for_copies()
        if self._ending.world.is_main:
            try:
                self._write_result(outcome.status, outcome.step, outcome.metrics, outcome.message)
            except OSError as error:
                raise UserError(
                    f"run.output_dir {self._recipe.run.output_dir}: result.json cannot be written ({error.strerror}); "
                    "everything else is complete: free disk space, then run the same command again"
                ) from error
        return self._copies

    def record_failure(self, message: str) -> None:
        """Write result.json with the last step and the error. Called only on rank 0."""
        try:
            self._write_result("failed", self._loop.step, self._loop.metrics, message)
        except OSError as error:  # the disk may be full
            log.error("result.json cannot be written: %s", error.strerror)

    def wait_for_copies(self) -> None:
        """Wait until all files are uploaded to checkpoint.storage or the uploads stall. All ranks must call this."""
        self._copies = finish_copies(self._recipe, self._ending.world, self._mirror)

    def _write_result(self, status: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        """Write result.json and the run page. Raises OSError.

        status: finished (all steps), preempted (stopped by a signal; the same command continues) or failed. step: last
        completed step. Non-finite metrics become null. Rank 0 writes this file last: a run without it is unfinished.
        """
        folder, start = self._recipe.run.output_dir, self._ending.start_time
        now = datetime.datetime.now(datetime.UTC)
        result: dict[str, Any] = {
            "status": status,
            "step": step,
            "message": message,
            "started": start.isoformat(timespec="seconds"),
            "finished": now.isoformat(timespec="seconds"),
            "seconds": round((now - start).total_seconds(), 3),
            "metrics": {tag: finite_or_none(value) for tag, value in metrics.items()},
            "artifacts": dict(self._exporter.artifacts),
            **({} if self._copies is None else {"storage": dataclasses.asdict(self._copies)}),
        }
        atomic.write_text(folder / RESULT_FILE, json.dumps(result, indent=2, allow_nan=False) + "\n")
        if self._recipe.logging.page:
            try_write_page(folder)
        if self._mirror is not None and self._copies is not None:
            self._copies = send_result(self._mirror, self._copies)


@contextmanager
def record_run(
    ending: RunShutdown, recipe: Recipe, mirror: Mirror | None, loop: RunProgress, exporter: RunExports
) -> Iterator[ResultRecorder]:
    """Record a failure of the block in result.json, then wait for uploads to the Hub.

    After an error that all ranks raised, wait for the S3 copies before result.json is written.
    """
    record = ResultRecorder(recipe, ending, mirror, loop, exporter)
    try:
        with ending.use_recorder(record.record_failure):
            try:
                yield record
                ending.ignore_later_failures()
            except (RunError, UserError) as error:
                if is_shared_error(error, ending.world):
                    record.wait_for_copies()
                raise
    except (RunError, UserError) as error:
        if is_shared_error(error, ending.world):
            exporter.finish_push()
        raise
    exporter.finish_push()
