"""Output for people: metrics.jsonl, a progress line, trackers. Which metrics exist is not its business."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from wfm_ds.errors import UserError
from wfm_ds.monitoring.progress import ConsoleProgress, LineProgress, Pace, open_console
from wfm_ds.monitoring.samples import ShownSample, by_prompt
from wfm_ds.monitoring.tracking import Subscriber
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

log = logging.getLogger(__name__)


class Monitor:
    """Rank 0 writes; on the other ranks every method does nothing. Close it, or use it as a context manager."""

    def __init__(
        self,
        output_dir: Path,
        *,
        is_main: bool,
        console: bool,
        total_steps: int,
        unit: str = "images",
        trackers: Sequence[Subscriber] = (),
    ) -> None:
        """Continue `output_dir/metrics.jsonl` and tell these trackers, which are started, of everything.

        With `console` and a terminal there is a live progress line; otherwise progress is logged now and then.
        `unit` is what `progress` counts. Raises OSError if the folder cannot be written.
        """
        self._open = is_main
        if not is_main:
            return
        self._folder = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._trackers = list(trackers)
        self._end: tuple[str, Mapping[str, float]] = ("failed", {})
        self._pace = Pace(total_steps, unit)
        screen = open_console() if console else None
        self._progress = LineProgress(total_steps) if screen is None else ConsoleProgress(screen, total_steps)
        self._warned: set[str] = set()
        self._last: list[str] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line `{"step", "time", tags...}` in metrics.jsonl, at once on disk, and a point per tag in each tracker.

        A value that is not finite becomes null in the file and no point, with one warning per tag. Raises ValueError
        if a tag is named like one of the line's own keys, UserError if the disk does not take it.
        """
        if not self._open:
            return
        clash = values.keys() & {"step", "time"}
        if clash:
            raise ValueError(f"{sorted(clash)} cannot be metrics: each line has keys of these names")
        finite = {tag: finite_or_none(value) for tag, value in values.items()}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._writing():
            self._metrics.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
            self._metrics.flush()
        points = {tag: value for tag, value in finite.items() if value is not None}
        for tracker in self._trackers:
            tracker.scalars(step, points)
        for tag in (tag for tag, value in finite.items() if value is None):
            self._warn_not_finite(step, tag, values[tag])

    def samples(self, step: int, tag: str, samples: Sequence[ShownSample]) -> None:
        """Show samples in each tracker, those of a prompt beside each other."""
        if not self._open or not samples:
            return
        siblings = by_prompt(samples)
        for tracker in self._trackers:
            tracker.samples(step, tag, siblings)

    def ended(self, status: str, metrics: Mapping[str, float]) -> None:
        """Note how the run ended, for the trackers; one that is closed without this has failed."""
        if self._open:
            self._end = status, {tag: value for tag, value in metrics.items() if finite_or_none(value) is not None}

    def progress(self, step: int, *, samples: int, note: str = "") -> None:
        """`step` is done, with `samples` more than at the last call; the first call, at the start, sets the clock."""
        if not self._open:
            return
        now_s = time.monotonic()
        self._pace.update(now_s, step, samples)
        self._progress.show(now_s, step, self._pace.text(step, note))

    def sync(self) -> int:
        """Put all metrics on disk; returns the bytes of metrics.jsonl (0 on the other ranks). Raises OSError."""
        if not self._open:
            return 0
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def message(self, text: str) -> None:
        """A line for people: in the log, and above the progress line if there is one."""
        if self._open:
            log.info("%s", text)

    def last_message(self, text: str) -> None:
        """Lines for people to copy: logged when the monitor is closed. A live progress line would wrap them."""
        if self._open:
            self._last.append(text)

    def close(self) -> None:
        """Show the last progress and the last messages, and close all files; the second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._progress.close()
        for text in self._last:
            log.info("%s", text)
        for tracker in self._trackers:
            tracker.close(*self._end)
        with suppress(OSError):  # what a full disk did not take was said when it was written
            self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run.output_dir {self._folder} takes no more metrics ({error.strerror}): make room, then start the "
                "same command again; it continues from the newest checkpoint"
            ) from error

    def _warn_not_finite(self, step: int, tag: str, value: float) -> None:
        if tag not in self._warned:
            self._warned.add(tag)
            log.warning("step %d: %s is %s; it is written as null, and this is said once", step, tag, value)


def cut_metrics(path: Path, num_bytes: int) -> None:
    """Drop the lines of metrics.jsonl beyond its first `num_bytes`, and half a line at its end. OSError if it cannot.

    A file that is shorter (the machine went down before it was on disk) keeps its whole lines.
    """
    kept = path.read_bytes()[:num_bytes] if path.exists() else b""
    atomic.write_text(path, kept[: kept.rfind(b"\n") + 1].decode())
