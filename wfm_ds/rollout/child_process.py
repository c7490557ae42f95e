"""A child process that is restarted when it dies."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

STOP_S = 20.0  # maximum wait for the process to exit
DEATHS_WINDOW_S = 600.0


class RestartingProcess:
    """Runs a child process and restarts it when it dies. The process must exit when its stdin is closed."""

    def __init__(
        self,
        name: str,
        start: Callable[[], subprocess.Popen[bytes]],
        should_restart: Callable[[int, deque[float]], bool],
    ) -> None:
        """Start the process. Call `watch` to restart it when it dies.

        start: function that starts the process, with a pipe as stdin.
        should_restart: function (exit status, times of all deaths in the last DEATHS_WINDOW_S seconds) that returns
        whether to restart the process. A thread calls the function after each death.
        """
        self.name = name
        self._start, self._should_restart = start, should_restart
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # prevents a restart after a stop request
        self.process = start()
        self.watcher = threading.Thread(target=self._watch, name=name, daemon=True)

    def watch(self) -> None:
        self.watcher.start()

    def request_stop(self) -> None:
        with self._lock:
            self._stopping.set()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        """Stop the process. Kill it if it does not exit within STOP_S seconds. Repeated calls are allowed."""
        self.request_stop()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within %.0f s: killing it", self.name, STOP_S)
            self.process.kill()
            self.process.wait()

    def _watch(self) -> None:
        deaths: deque[float] = deque()
        while True:
            status = self.process.wait()
            if self._stopping.is_set():
                return
            deaths.append(time.monotonic())
            while deaths[-1] - deaths[0] > DEATHS_WINDOW_S:
                deaths.popleft()
            if not self._should_restart(status, deaths):
                return
            log.warning("%s died (exit status %d): restarting it", self.name, status)
            self._stopping.wait(2.0 ** (len(deaths) - 1))
            with self._lock:
                if self._stopping.is_set():
                    return
                self.process = self._start()


def read_last_error(log_path: Path) -> str:
    """Return the MESSAGE of the last log line `error: MESSAGE`, or "" if there is none."""
    lines = log_path.read_text(errors="replace").splitlines()
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
