"""Progress display for waits outside of training steps: a bar on a terminal, otherwise a line every LINE_INTERVAL_S
seconds.

Only rank 0 shows it, and only for waits longer than SHOW_AFTER_S seconds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.logs import is_console_quiet
from wfm_ds.distributed.ranks import read_rank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

log = logging.getLogger(__name__)

Item = TypeVar("Item")

SHOW_AFTER_S = 2.0  # a bar for a shorter wait would only flicker
LINE_INTERVAL_S = 30.0


@contextlib.contextmanager
def track_progress(items: Iterable[Item], title: str, *, total: int) -> Iterator[Iterator[Item]]:
    """Yield an iterator over `items`, and show how many items are done and the estimated remaining time.

    title: what is done, such as "encoding texts". total: number of items. Each item also counts as progress for the
    hang watchdog (liveness.py).
    """

    def count_items() -> Iterator[Item]:
        for item in items:
            yield item
            LIVENESS.record_progress(title)
            display.advance()

    with ProgressDisplay(title, total) as display:
        yield count_items()


@contextlib.contextmanager
def show_wait(title: str, total: int | None = None) -> Iterator[ProgressDisplay]:
    """Show how long the block has been running. Use it if the remaining time is unknown, e.g. while loading files.

    total: number of items, for a block that calls `advance` of the yielded display, but rarely. The waiting time does
    not count as progress for the hang watchdog.
    """
    with ProgressDisplay(title, total) as display, call_periodically(display.update, SHOW_AFTER_S):
        yield display


@contextlib.contextmanager
def call_periodically(action: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call `action` in a thread every `interval_s` seconds during the block."""
    finished = threading.Event()

    def run() -> None:
        while not finished.wait(interval_s):
            action()

    thread = threading.Thread(target=run, name="periodic", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


class ProgressDisplay:
    """Context manager that shows the progress of one wait. total: number of items, or None if it is unknown."""

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total = title, total
        self._num_done = 0
        self._start_s = self._line_s = time.monotonic()
        self._is_shown = read_rank(os.environ) == 0 and not is_console_quiet()
        self._bar: Progress | None = None
        self._lock = threading.Lock()  # show_wait updates it in a thread

    def advance(self, num_items: int = 1) -> None:
        self._num_done += num_items
        self.update()

    def update(self) -> None:
        now_s = time.monotonic()
        if not self._is_shown or now_s - self._start_s < SHOW_AFTER_S:
            return
        with self._lock:
            if self._bar is None and (console := open_console()) is not None:
                self._bar = self._start_bar(console, now_s - self._start_s)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._num_done)
            elif now_s - self._line_s >= LINE_INTERVAL_S:
                self._line_s = now_s
                write_line(format_progress(self._title, self._num_done, self._total, now_s - self._start_s))

    def _start_bar(self, console: Console, elapsed_s: float) -> Progress:
        from rich import progress

        columns = [progress.TextColumn("{task.description}", markup=False), progress.BarColumn(bar_width=20)]
        if self._total is None:
            columns += [progress.TimeElapsedColumn()]
        else:
            columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
        bar = progress.Progress(*columns, console=console, transient=True)
        bar.add_task(self._title, total=self._total)
        [task] = bar.tasks
        assert task.start_time is not None
        task.start_time -= elapsed_s
        bar.start()
        return bar

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def open_console() -> Console | None:
    """Return the console on stderr, or None if stderr is not a terminal.

    All bars must use this console, because rich draws simultaneous bars below each other only if they share a console.
    """
    return _stderr_console() if sys.stderr.isatty() else None  # with FORCE_COLOR, rich treats pipes as terminals


@functools.cache
def _stderr_console() -> Console:
    from rich.console import Console  # slow import

    return Console(stderr=True)


def format_progress(title: str, num_done: int, total: int | None, elapsed_s: float) -> str:
    """Return "encoding texts: 30 of 120, 1:30 left", or "loading: 0:30 so far" if the total is unknown."""
    if total is None:
        return f"{title}: {format_duration(elapsed_s)} so far"
    left = f", {format_duration(elapsed_s / num_done * (total - num_done))} left" if num_done else ""
    return f"{title}: {num_done} of {total}{left}"


def format_duration(seconds: float) -> str:
    """Return a duration as H:MM:SS, or as M:SS if it is shorter than an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def write_line(text: str) -> None:
    """Log a line, or write it to stderr if the command has not set up logging."""
    if logging.getLogger().handlers:
        log.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
