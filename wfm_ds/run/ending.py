"""How a run ends and what it leaves as its last word: result.json on rank 0, and the heartbeat told."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from wfm_ds.distributed.heartbeat import Heartbeat
    from wfm_ds.distributed.world import World
    from wfm_ds.errors import UserError
    from wfm_ds.run.folder import Start
    from wfm_ds.run.mirror import Mirror
    from wfm_ds.run.result import Outcome
    from wfm_ds.run.stored import Copies

log = logging.getLogger(__name__)

LONE = "error: "  # what a rank says to the others of a UserError of its own begins like this


class Progress(Protocol):
    """What a run has reached: a training loop."""

    step: int  # the last one done
    metrics: dict[str, float]  # of that step


class Exports(Protocol):
    """What a run has exported so far."""

    @property
    def artifacts(self) -> Mapping[str, str]:
        """Paths by kind."""
        ...


class Ending:
    """Writes result.json once, on rank 0, as the run's last act; nothing before the output folder is ours.

    A run that ends in an error before its first step takes back what it wrote, so that the mended recipe can start.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.started = datetime.datetime.now(datetime.UTC)
        self.start: Start | None = None  # once the folder is ours
        self.loop: Progress | None = None  # once it runs
        self.exporter: Exports | None = None
        self.heartbeat: Heartbeat | None = None  # of a run of several ranks
        self._recording, self._is_recorded = threading.Lock(), False  # the heartbeat's thread may come with a verdict
        self.mirror: Mirror | None = None  # rank 0's, of a run that is copied to a storage
        self.copies: Copies | None = None  # once the run has waited for them
        self.error_code = 1  # of a run that was ended by an error, its user's or not

    @property
    def exit_code(self) -> int:
        """Of a run that was not ended by an error."""
        return 0 if self.copies is None or not self.copies.missing else 1

    def reached(self, outcome: Outcome) -> None:
        from wfm_ds.distributed.lifecycle import write_status

        if self.world.is_main:
            if self.start is not None:  # not if the run had finished before
                self._write(outcome.status, outcome.step, outcome.metrics, "")
            if self.exit_code == 0:
                write_status(outcome.status, outcome.step)
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def failed(self, message: str) -> None:
        """By an error that all ranks have."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        self._record_failure(message)

    def failed_alone(self, error: UserError) -> bool:
        """By an error of the user's that the other ranks may not have: they wait for this one in an exchange, and end
        by the heartbeat's verdict. Whether this rank is the one to say it."""
        from wfm_ds.distributed.lifecycle import USER_ERROR

        self.error_code = USER_ERROR
        verdict = self.heartbeat.failed(f"{LONE}{error}", is_victim=False) if self.heartbeat is not None else None
        self._record_failure(str(error))
        return verdict is None or self.world.rank in verdict.ranks

    def unexpected(self, error: Exception) -> bool:
        """By an error of this rank, which ends all. Whether another rank is to blame, and was named."""
        from wfm_ds.distributed.heartbeat import is_broken_exchange

        message, is_victim = f"{type(error).__name__}: {error}", is_broken_exchange(error)
        verdict = self.heartbeat.failed(message, is_victim=is_victim) if self.heartbeat is not None else None
        if verdict is not None and is_victim:
            self.judged(verdict.text)
            log.error("rank %d saw it as %s", self.world.rank, message)
            if self.world.rank in verdict.ranks:  # the exchange broke here
                traceback.print_exception(error)
            return True
        self._record_failure(message)
        return False

    def judged(self, verdict: str) -> None:
        """By another rank; called from the heartbeat's thread where the main one cannot go on."""
        from wfm_ds.distributed.lifecycle import USER_ERROR

        if f" failed: {LONE}" in verdict:
            self.error_code = USER_ERROR
        log.error("the run ends: %s", verdict)
        if not self.world.is_main and self.world.local_rank == 0:  # one voice for each machine; the log has rank 0's
            os.write(2, f"rank {self.world.rank}: the run ends: {verdict}\n".encode())
        self._record_failure(verdict)

    def _record_failure(self, message: str) -> None:
        from wfm_ds.run.folder import clear_run
        from wfm_ds.run.layout import REWARD, ROLLOUT

        if self.start is None or not self.world.is_main:
            return
        with self._recording:
            if self._is_recorded:
                return
            self._is_recorded = True
            if self.loop is not None:
                self._write("failed", self.loop.step, self.loop.metrics, message)
            elif self.start.is_new:
                clear_run(self.folder, keep=[REWARD, ROLLOUT])  # their logs may be what the message is about

    def _write(self, status: str, step: int, metrics: Mapping[str, float], message: str) -> None:
        from wfm_ds.run.result import write_result
        from wfm_ds.run.stored import send_result

        artifacts = self.exporter.artifacts if self.exporter is not None else {}

        def write() -> None:
            write_result(
                self.folder,
                status=status,
                step=step,
                metrics=metrics,
                artifacts=artifacts,
                started=self.started,
                message=message,
                storage=None if self.copies is None else dataclasses.asdict(self.copies),
            )

        write()
        if self.mirror is not None and self.copies is not None:
            sent = send_result(self.mirror, self.copies)
            if sent != self.copies:
                self.copies = sent
                write()
