"""Progress and speed of a run, and two ways to show them. The caller passes the current time."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

log = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0  # seconds between log lines if there is no terminal for a live line
WINDOW = 20  # number of last steps over which the speed is measured


class _ProgressPoint(NamedTuple):
    now_s: float
    step: int
    samples: int  # number of samples since the start


class Pace:
    """Speed of a run over the last WINDOW steps, and its remaining time."""

    def __init__(self, total_steps: int, unit: str) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self._points: deque[_ProgressPoint] = deque(maxlen=WINDOW + 1)

    def update(self, now_s: float, step: int, samples: int) -> None:
        """Record that `step` was done at time `now_s`. samples: number of samples since the last update."""
        before = self._points[-1].samples if self._points else 0
        self._points.append(_ProgressPoint(now_s, step, before + samples))

    def speed(self) -> tuple[float, float] | None:
        """Return (steps per second, samples per second), None until there are two updates to compare."""
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        seconds = last.now_s - first.now_s
        if seconds <= 0 or last.step <= first.step:
            return None
        return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds

    def format_text(self, step: int, note: str = "") -> str:
        """Return `step 12/300, 1:04:10 left, 8.1 images/s, NOTE`, without time and speed until they are known."""
        parts = [f"step {step}/{self.total_steps}"]
        speed = self.speed()
        if speed is not None:
            parts += [f"{format_duration((self.total_steps - step) / speed[0])} left", f"{speed[1]:.3g} {self.unit}/s"]
        return ", ".join([*parts, *([note] if note else [])])


def format_duration(seconds: float) -> str:
    """Format seconds as H:MM:SS, or M:SS below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LineProgress:
    """Shows progress as log lines: at most one per LINE_INTERVAL_S, and always the first and the last step."""

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
    """Shows progress in one line at the bottom of a terminal. Other output appears above it."""

    def __init__(self, console: Console, total_steps: int) -> None:
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("", total=total_steps)
        self._bar.start()

    def update(self, now_s: float, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)

    def close(self) -> None:
        self._bar.stop()


def open_console() -> Console | None:
    """Return a console on stderr if it is a terminal, else None. stdout is reserved for the results of commands."""
    console = Console(stderr=True)
    return console if console.is_terminal else None
