"""Output for users: metrics.jsonl, a progress line and trackers."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from wfm_ds.distributed.progress import format_duration, open_console
from wfm_ds.errors import UserError
from wfm_ds.monitoring.samples import GeneratedSample, group_by_prompt
from wfm_ds.monitoring.tracking import TrackerThread
from wfm_ds.storage import atomic
from wfm_ds.storage.atomic import finite_or_none

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # seconds between log lines if there is no terminal for a live line
WINDOW = 20  # number of last steps over which the speed is measured


class Monitor:
    """A run's metrics file, progress display and trackers. Only rank 0 writes. Call `close` at the end."""

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

        console: True: show progress as a live line if stderr is a terminal. False: log it periodically. unit: what the
        progress display counts, such as images. trackers: started trackers, which receive all metrics and samples.
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

        A non-finite value becomes null in the file and is not sent to trackers. Raises ValueError if a tag is called
        `step` or `time`, and UserError if the line cannot be written.
        """
        if not self._open:
            return
        clash = values.keys() & {"step", "time"}
        if clash:
            raise ValueError(f"invalid metric names {sorted(clash)}: each line has keys of these names")
        finite = {tag: finite_or_none(value) for tag, value in values.items()}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        try:
            self._metrics.write(json.dumps({"step": step, "time": now, **finite}, allow_nan=False) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise UserError(
                f"run.output_dir {self._folder}: metrics cannot be written ({error.strerror}): free space, then "
                "start the same command again; it resumes from the newest checkpoint"
            ) from error
        points = {tag: value for tag, value in finite.items() if value is not None}
        for tracker in self._trackers:
            tracker.log_scalars(step, points)
        for tag in [tag for tag in finite if tag not in points and tag not in self._warned]:
            self._warned.add(tag)
            text = "step %d: %s is %s; it is written as null, and this warning is not repeated"
            log.warning(text, step, tag, values[tag])

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        if not self._open or not samples:
            return
        siblings = group_by_prompt(samples)
        for tracker in self._trackers:
            tracker.log_samples(step, tag, siblings)

    def set_outcome(self, status: str, metrics: Mapping[str, float]) -> None:
        """Set the run's outcome for the trackers. Without an outcome, they report a failed run."""
        if self._open:
            self._outcome = status, {tag: value for tag, value in metrics.items() if finite_or_none(value) is not None}

    def update_progress(self, step: int, *, samples: int, note: str = "") -> None:
        """Show that `step` is done. samples: number of samples since the last call. note: text added to the line.

        Call it once with samples=0 at the start of the run, to start measuring the speed.
        """
        if not self._open:
            return
        now_s = time.monotonic()
        self._pace.update(now_s, step, samples)
        self._progress.update(now_s, step, self._pace.format_text(step, note))

    def sync_metrics(self) -> int:
        """Flush metrics.jsonl to disk. Returns its size in bytes, or 0 on ranks other than 0. Raises OSError."""
        if not self._open:
            return 0
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return os.fstat(self._metrics.fileno()).st_size

    def log_message(self, text: str) -> None:
        if self._open:
            log.info("%s", text)

    def log_at_close(self, text: str) -> None:
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


def truncate_metrics(path: Path, num_bytes: int) -> None:
    """Truncate metrics.jsonl to `num_bytes`, and remove a partial line at its end. Raises OSError."""
    content = path.read_bytes()[:num_bytes] if path.exists() else b""
    atomic.write_text(path, content[: content.rfind(b"\n") + 1].decode())


class _ProgressPoint(NamedTuple):
    now_s: float
    step: int
    samples: int  # number of samples since the start


class Pace:
    """Speed of a run over the last WINDOW steps, and the remaining time of the run."""

    def __init__(self, total_steps: int, unit: str) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self._points: deque[_ProgressPoint] = deque(maxlen=WINDOW + 1)

    def update(self, now_s: float, step: int, samples: int) -> None:
        """Record that `step` was done at time `now_s`. samples: number of samples since the last update."""
        before = self._points[-1].samples if self._points else 0
        self._points.append(_ProgressPoint(now_s, step, before + samples))

    def speed(self) -> tuple[float, float] | None:
        """Return (steps per second, samples per second), or None until there are two updates."""
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        seconds = last.now_s - first.now_s
        if seconds <= 0 or last.step <= first.step:
            return None
        return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds

    def format_text(self, step: int, note: str = "") -> str:
        """Return `step 12/300, 1:04:10 left, 8.1 images/s, NOTE`. Time and speed are omitted until they are known."""
        parts = [f"step {step}/{self.total_steps}"]
        speed = self.speed()
        if speed is not None:
            parts += [f"{format_duration((self.total_steps - step) / speed[0])} left", f"{speed[1]:.3g} {self.unit}/s"]
        return ", ".join([*parts, *([note] if note else [])])


class LineProgress:
    """Logs progress at most once per LINE_INTERVAL_S, and always the first and the last step."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._shown_s: float | None = None
        self._pending_text: str | None = None

    def update(self, now_s: float, step: int, text: str) -> None:
        should_log = self._shown_s is None or now_s - self._shown_s >= LINE_INTERVAL_S or step >= self._total_steps
        if should_log:
            log.info("%s", text)
            self._shown_s = now_s
        self._pending_text = None if should_log else text

    def close(self) -> None:
        if self._pending_text is not None:
            log.info("%s", self._pending_text)
            self._pending_text = None


class ConsoleProgress:
    """Shows progress in one line at the bottom of a terminal."""

    def __init__(self, console: Console, total_steps: int) -> None:
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def update(self, now_s: float, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)

    def close(self) -> None:
        self._bar.stop()
