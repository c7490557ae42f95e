"""Shutdown of a run, as nested contexts.

    with watch_ranks(world) as shutdown:                  errors reach the other ranks and become an exit code
        with shutdown.use_recorder(discard_new_run(...)): a failure before the first step restores the folder
            with record_run(shutdown, ...) as record:     result.json states the last step and the error

A failure is recorded once, on rank 0, by the innermost context. This happens in the main thread or, if that hangs, in
the heartbeat thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wfm_ds.errors import RunError, UserError

if TYPE_CHECKING:
    from wfm_ds.distributed.heartbeat import Heartbeat
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.run.folder import Start
    from wfm_ds.run.mirror import Mirror
    from wfm_ds.run.result import Outcome
    from wfm_ds.run.stored import Copies

log = logging.getLogger(__name__)

LONE = "error: "  # prefix of a UserError that only one rank has, as sent to the other ranks


class Progress(Protocol):
    """Progress of a run, provided by its training loop."""

    step: int  # last completed step
    metrics: Mapping[str, float]  # of that step


class Exports(Protocol):
    """Exports of a run."""

    @property
    def artifacts(self) -> Mapping[str, str]:
        """Paths by kind."""
        ...


@dataclass(frozen=True, slots=True)
class Cause:
    """The error that ended a run, as agreed by the ranks."""

    message: str
    is_own: bool  # this rank reports it


class Ending:
    """Error handling of a run across its ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started = datetime.datetime.now(datetime.UTC)
        self.error_code = 1  # exit code if an error ends the run
        self.heartbeat: Heartbeat | None = None  # for several ranks
        self._cause: Cause | None = None
        self._records: list[Callable[[str], None]] = []  # of the entered contexts, innermost last
        self._recording, self._is_recorded = threading.Lock(), False

    @contextmanager
    def recording(self, record: Callable[[str], None]) -> Iterator[None]:
        """Call `record(message)` on rank 0 if the block fails, instead of the recorders of outer contexts."""
        self._records.append(record)
        try:
            yield
        except Exception as error:
            self._record(self.cause_of(error).message)
            raise
        finally:
            self._records.pop()

    def cause_of(self, error: Exception) -> Cause:
        """Report this error to the other ranks, once, and return the agreed cause."""
        if self._cause is None:
            self._cause = self._agreed_cause(error)
        return self._cause

    def ended_by_fault(self, text: str) -> None:
        """Log and record the fault of any rank. The heartbeat thread calls it if the main thread hangs."""
        from wfm_ds.program import USER_ERROR

        if f" failed: {LONE}" in text:
            self.error_code = USER_ERROR
        log.error("the run ends: %s", text)
        if not self.world.is_main and self.world.local_rank == 0:  # one message per machine; rank 0 logs
            os.write(2, f"rank {self.world.rank}: the run ends: {text}\n".encode())
        self._record(text)

    def _agreed_cause(self, error: Exception) -> Cause:
        from wfm_ds.distributed.heartbeat import is_broken_exchange
        from wfm_ds.program import USER_ERROR

        heartbeat, rank = self.heartbeat, self.world.rank
        if is_shared(error, self.world):
            if heartbeat is not None:
                heartbeat.stop()
            return Cause(str(error), is_own=self.world.is_main)
        if isinstance(error, UserError):  # the others wait for this rank in a collective and end through the heartbeat
            self.error_code = USER_ERROR
            fault = heartbeat.failed(f"{LONE}{error}", is_secondary=False) if heartbeat is not None else None
            return Cause(str(error), is_own=fault is None or rank in fault.ranks)
        message, is_secondary = f"{type(error).__name__}: {error}", is_broken_exchange(error)
        fault = heartbeat.failed(message, is_secondary=is_secondary) if heartbeat is not None else None
        if fault is None or not is_secondary:
            return Cause(message, is_own=True)
        self.ended_by_fault(fault.text)
        log.error("rank %d: resulting error: %s", rank, message)
        if rank in fault.ranks:  # the collective failed on this rank
            traceback.print_exception(error)
        return Cause(fault.text, is_own=False)

    def _record(self, message: str) -> None:
        with self._recording:
            if self.world.is_main and self._records and not self._is_recorded:
                self._is_recorded = True
                self._records[-1](message)


def is_shared(error: Exception, world: World) -> bool:
    """Return whether all ranks have this error, so that collectives still work."""
    return isinstance(error, (RunError, UserError)) and (error.agreed or world.size == 1)


@contextmanager
def watched(world: World, *, stuck_s: float) -> Iterator[Ending]:
    """Share errors of the block between the ranks. Collective.

    Reported errors (UserError, RunError, errors of other ranks) become SystemExit with the run's exit code. Unexpected
    errors of this rank propagate. stuck_s: end the run after this many seconds without progress on any rank.
    """
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.heartbeat import start

    ending = Ending(world)
    try:
        # A rank that ends because of another rank uses its exit code: the launcher reports the first one it sees.
        ending.heartbeat = start(
            world,
            stuck_s=stuck_s,
            on_end=ending.ended_by_fault,
            exit_process=lambda _: os._exit(ending.error_code),
        )
        yield ending
    except UserError as error:
        lifecycle.user_error_exit(str(error), world.rank, speaks=ending.cause_of(error).is_own)
    except RunError as error:
        log.error("%s", ending.cause_of(error).message)
        raise SystemExit(1) from error
    except Exception as error:
        if ending.cause_of(error).is_own:
            raise
        raise SystemExit(ending.error_code) from error
    if ending.heartbeat is not None:
        ending.heartbeat.stop()


def take_back(folder: Path, start: Start) -> Callable[[str], None]:
    """Return a recorder for failures before the first step. It clears the folder of a new run, so that the corrected
    recipe can start."""

    def record(message: str) -> None:
        from wfm_ds.run.folder import clear_run
        from wfm_ds.run.layout import REWARD, ROLLOUT

        if start.is_new:
            clear_run(folder, keep=[REWARD, ROLLOUT])  # the message may refer to their logs

    return record


class Record:
    """Writes result.json once the loop has started. Exists on every rank; rank 0 writes."""

    def __init__(
        self, recipe: Recipe, ending: Ending, mirror: Mirror | None, loop: Progress, exporter: Exports
    ) -> None:
        self._recipe, self._ending, self._mirror = recipe, ending, mirror
        self._loop, self._exporter = loop, exporter
        self._copies: Copies | None = None  # set after waiting for them

    def ended(self, outcome: Outcome) -> Copies | None:
        """Wait for the copies of a successful run and write result.json. Collective."""
        self.wait_for_copies()
        if self._ending.world.is_main:
            try:
                self._write(outcome.status, outcome.step, outcome.metrics, "")
            except OSError as error:
                raise UserError(
                    f"run.output_dir {self._recipe.run.output_dir}: result.json cannot be written ({error.strerror}); "
                    "everything else is complete: free disk space, then run the same command again"
                ) from error
        return self._copies

    def failed(self, message: str) -> None:
        """Write result.json with the last step and the error, on rank 0."""
        try:
            self._write("failed", self._loop.step, self._loop.metrics, message)
        except OSError as error:  # the disk may be full
            log.error("result.json cannot be written: %s", error.strerror)

    def wait_for_copies(self) -> None:
        """Wait until the storage has all files, or stops accepting data. Collective."""
        from wfm_ds.run.stored import finish

        self._copies = finish(self._recipe, self._ending.world, self._mirror)

    def _write(self, status: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        from wfm_ds.monitoring.run_page import write_or_warn
        from wfm_ds.run.result import write_result
        from wfm_ds.run.stored import send_result

        def write() -> None:
            write_result(
                self._recipe.run.output_dir,
                status=status,
                step=step,
                metrics=metrics,
                artifacts=self._exporter.artifacts,
                started=self._ending.started,
                message=message,
                storage=None if self._copies is None else dataclasses.asdict(self._copies),
            )

        write()
        if self._recipe.logging.page:
            write_or_warn(self._recipe.run.output_dir)
        if self._mirror is not None and self._copies is not None:
            sent = send_result(self._mirror, self._copies)
            if sent != self._copies:
                self._copies = sent
                write()


@contextmanager
def recorded(
    ending: Ending, recipe: Recipe, mirror: Mirror | None, loop: Progress, exporter: Exports
) -> Iterator[Record]:
    """Record a failure of the block in result.json. If all ranks have the error, wait for the copies first."""
    record = Record(recipe, ending, mirror, loop, exporter)
    with ending.recording(record.failed):
        try:
            yield record
        except (RunError, UserError) as error:
            if is_shared(error, ending.world):
                record.wait_for_copies()
            raise
