"""The end of a run, as contexts one inside the other.

    with watched(world) as ending:                    the process: the other ranks are told, an exit code is left
        with ending.recording(take_back(...)):        the folder is this run's: a failure leaves it as it was
            with recorded(ending, ...) as record:     the loop runs: result.json says how far it came, and why it ended

A failure is recorded once, on rank 0, by the innermost context: on the way out of the main thread, or by the
heartbeat's thread where the main one hangs.
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

LONE = "error: "  # what a rank tells the others of a UserError of its own begins like this


class Progress(Protocol):
    """Progress of a run, as its training loop has it."""

    step: int  # the last one done
    metrics: Mapping[str, float]  # of that step


class Exports(Protocol):
    """Exports of a run so far."""

    @property
    def artifacts(self) -> Mapping[str, str]:
        """Paths by kind."""
        ...


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a run ends by an error, as far as the ranks could agree."""

    message: str
    is_own: bool  # this rank is the one to say it


class Ending:
    """The run's end by an error, as this rank and the others know it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started = datetime.datetime.now(datetime.UTC)
        self.error_code = 1  # the exit code of a run that is ended by an error
        self.heartbeat: Heartbeat | None = None  # of a run of several ranks
        self._cause: Cause | None = None
        self._records: list[Callable[[str], None]] = []  # of the contexts that are entered, the innermost last
        self._recording, self._is_recorded = threading.Lock(), False

    @contextmanager
    def recording(self, record: Callable[[str], None]) -> Iterator[None]:
        """Inside, `record(message)` is what a failure leaves on rank 0, instead of what contexts further out would."""
        self._records.append(record)
        try:
            yield
        except Exception as error:
            self._record(self.cause_of(error).message)
            raise
        finally:
            self._records.pop()

    def cause_of(self, error: Exception) -> Cause:
        """Tell the other ranks of this error, once, and learn which rank is at fault."""
        if self._cause is None:
            self._cause = self._agreed_cause(error)
        return self._cause

    def ended_by_fault(self, text: str) -> None:
        """Log and record the fault of some rank; called from the heartbeat's thread where the main one cannot go on."""
        from wfm_ds.program import USER_ERROR

        if f" failed: {LONE}" in text:
            self.error_code = USER_ERROR
        log.error("the run ends: %s", text)
        if not self.world.is_main and self.world.local_rank == 0:  # one voice for each machine; the log has rank 0's
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
        if isinstance(error, UserError):  # the others wait for this rank in an exchange, and end by its fault
            self.error_code = USER_ERROR
            fault = heartbeat.failed(f"{LONE}{error}", is_secondary=False) if heartbeat is not None else None
            return Cause(str(error), is_own=fault is None or rank in fault.ranks)
        message, is_secondary = f"{type(error).__name__}: {error}", is_broken_exchange(error)
        fault = heartbeat.failed(message, is_secondary=is_secondary) if heartbeat is not None else None
        if fault is None or not is_secondary:
            return Cause(message, is_own=True)
        self.ended_by_fault(fault.text)
        log.error("rank %d saw it as %s", rank, message)
        if rank in fault.ranks:  # the exchange broke here
            traceback.print_exception(error)
        return Cause(fault.text, is_own=False)

    def _record(self, message: str) -> None:
        with self._recording:
            if self.world.is_main and self._records and not self._is_recorded:
                self._is_recorded = True
                self._records[-1](message)


def is_shared(error: Exception, world: World) -> bool:
    """Tell if all ranks have this error, so that they can go on talking to each other."""
    return isinstance(error, (RunError, UserError)) and (error.agreed or world.size == 1)


@contextmanager
def watched(world: World, *, stuck_s: float) -> Iterator[Ending]:
    """Inside, each rank hears when another one cannot go on. Collective.

    Leaves by SystemExit with the run's exit code once an error of the user's, of the run or of another rank is said; an
    error that nobody expected leaves as it is. stuck_s: the run ends if no rank moves for so long.
    """
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.heartbeat import start

    ending = Ending(world)
    try:
        # Who is ended by another rank's error has that one's exit code: the launcher reports whichever it sees first.
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
    """A record of a run that ends before its first step: a new one leaves the folder as it was, so that the mended
    recipe can start."""

    def record(message: str) -> None:
        from wfm_ds.run.folder import clear_run
        from wfm_ds.run.layout import REWARD, ROLLOUT

        if start.is_new:
            clear_run(folder, keep=[REWARD, ROLLOUT])  # their logs may be what the message is about

    return record


class Record:
    """Content of result.json for a run whose loop has begun. Every rank has one, rank 0 writes it."""

    def __init__(
        self, recipe: Recipe, ending: Ending, mirror: Mirror | None, loop: Progress, exporter: Exports
    ) -> None:
        self._recipe, self._ending, self._mirror = recipe, ending, mirror
        self._loop, self._exporter = loop, exporter
        self._copies: Copies | None = None  # once the run has waited for them

    def ended(self, outcome: Outcome) -> Copies | None:
        """Wait for the copies of a run that ends well, and write what it reached. Collective."""
        self.wait_for_copies()
        if self._ending.world.is_main:
            try:
                self._write(outcome.status, outcome.step, outcome.metrics, "")
            except OSError as error:
                raise UserError(
                    f"run.output_dir {self._recipe.run.output_dir} takes no result.json ({error.strerror}): all "
                    "else of the run is there; make room, then start the same command again"
                ) from error
        return self._copies

    def failed(self, message: str) -> None:
        """Write what the loop reached before it failed, on rank 0."""
        try:
            self._write("failed", self._loop.step, self._loop.metrics, message)
        except OSError as error:  # of a disk that is full, which is what ends the run more often than not
            log.error("result.json cannot be written: %s", error.strerror)

    def wait_for_copies(self) -> None:
        """Wait until the storage of the run has all that it left, or does not take it. Collective."""
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
    """Inside, a failure is recorded with what the loop reached; one that all ranks have waits for the copies before."""
    record = Record(recipe, ending, mirror, loop, exporter)
    with ending.recording(record.failed):
        try:
            yield record
        except (RunError, UserError) as error:
            if is_shared(error, ending.world):
                record.wait_for_copies()
            raise
