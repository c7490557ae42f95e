"""Output for users: metrics.jsonl, a progress line and trackers. Metrics may have any names."""

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
from wfm_ds.monitoring.samples import GeneratedSample, group_by_prompt
from wfm_ds.monitoring.tracking import TrackerThread
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

log = logging.getLogger(__name__)


class Monitor:
    """A run's metrics file, progress display and trackers. Only rank 0 writes. Close it, or use it in `with`."""

    def __init__(
        self,
        output_dir: Path,
        *,
        is_main: bool,
        console: bool,
        total_steps: int,
        unit: str = "images",
        trackers: Sequence[TrackerThread] = (),
    ) -> None:
        """Open `output_dir/metrics.jsonl` for appending. Raises OSError if the folder cannot be written.

        console: show progress as a live line if stderr is a terminal; otherwise it is logged periodically.
        unit: what `update_progress` counts. trackers: already started; they receive all metrics and samples.
        """
        self._open = is_main
        if not is_main:
            return
        self._folder = output_dir
        output_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = (output_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._trackers = list(trackers)
        self._outcome: tuple[str, Mapping[str, float]] = ("failed", {})
        self._pace = Pace(total_steps, unit)
        screen = open_console() if console else None
        self._progress = LineProgress(total_steps) if screen is None else ConsoleProgress(screen, total_steps)
        self._warned: set[str] = set()
        self._final_messages: list[str] = []

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line `{"step", "time", tags...}` to metrics.jsonl, and send the values to each tracker.

        A non-finite value becomes null in the file and is not sent to trackers; one warning is logged per tag. Raises
        ValueError if a tag is called `step` or `time`, UserError if the line cannot be written.
        """
        if not self._open:
            return
        clash = values.keys() & {"step", "time"}
        if clash:
            raise ValueError(f"invalid metric names {sorted(clash)}: each line has keys of these names")
        finite = {tag: finite_or_none(value) for tag, value in values.items()}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with self._translate_write_errors():
            self._metrics.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
            self._metrics.flush()
        points = {tag: value for tag, value in finite.items() if value is not None}
        for tracker in self._trackers:
            tracker.log_scalars(step, points)
        for tag in (tag for tag, value in finite.items() if value is None):
            self._warn_not_finite(step, tag, values[tag])

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        """Send samples to each tracker, grouped by prompt."""
        if not self._open or not samples:
            return
        siblings = group_by_prompt(samples)
        for tracker in self._trackers:
            tracker.log_samples(step, tag, siblings)

    def set_outcome(self, status: str, metrics: Mapping[str, float]) -> None:
        """Set the run's outcome for the trackers. Without one when the monitor closes, they report a failed run."""
        if self._open:
            self._outcome = status, {tag: value for tag, value in metrics.items() if finite_or_none(value) is not None}

    def update_progress(self, step: int, *, samples: int, note: str = "") -> None:
        """Show that `step` is done. samples: number of samples since the last call. note: text to append.

        Call it once with samples=0 at the start of the run: speed is measured from there.
        """
        if not self._open:
            return
        now_s = time.monotonic()
        self._pace.update(now_s, step, samples)
        self._progress.update(now_s, step, self._pace.format_text(step, note))

    def sync_metrics(self) -> int:
        """Flush metrics.jsonl to disk. Returns its size in bytes (0 on other ranks). Raises OSError if that fails."""
        if not self._open:
            return 0
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def log_message(self, text: str) -> None:
        """Log a line for the user, above the live progress line if there is one."""
        if self._open:
            log.info("%s", text)

    def log_at_close(self, text: str) -> None:
        """Log these lines when the monitor closes. Before that, a live progress line would wrap them."""
        if self._open:
            self._final_messages.append(text)

    def close(self) -> None:
        """Show the final progress, log the stored lines, and close file and trackers. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._progress.close()
        for text in self._final_messages:
            log.info("%s", text)
        for tracker in self._trackers:
            tracker.close(*self._outcome)
        with suppress(OSError):  # the failure was reported when the line was written
            self._metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _translate_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run.output_dir {self._folder}: metrics cannot be written ({error.strerror}): free space, then "
                "start the same command again; it resumes from the newest checkpoint"
            ) from error

    def _warn_not_finite(self, step: int, tag: str, value: float) -> None:
        if tag not in self._warned:
            self._warned.add(tag)
            log.warning("step %d: %s is %s; it is written as null, and this warning is not repeated", step, tag, value)


def truncate_metrics(path: Path, num_bytes: int) -> None:
    """Truncate metrics.jsonl to `num_bytes`, and remove a partial line at its end. Raises OSError if that fails.

    If the file is shorter, because the machine crashed before it was on disk, its complete lines are kept.
    """
    content = path.read_bytes()[:num_bytes] if path.exists() else b""
    atomic.write_text(path, content[: content.rfind(b"\n") + 1].decode())
