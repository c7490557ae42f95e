"""Stop and resume processes, wait for conditions, and limit memory use."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

PATIENCE_S = 60.0  # ends a hang; long enough for a busy machine
MIB, GIB = 2**20, 2**30


def until(condition, patience_s=PATIENCE_S):
    """Poll the condition and return its first true value. Fails after patience_s."""
    deadline_s = time.monotonic() + patience_s
    tick = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it did not happen"
        tick.wait(0.02)
    return value


def stop(*pids):
    """Send SIGSTOP and wait until the processes are stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))


def go_on(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def read_lines(path):
    """Return the JSON values in the lines of a file, or [] if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait(seconds):
    """Wait for a fixed time, for tests that must exceed a deadline."""
    threading.Event().wait(seconds)


@contextmanager
def modest(process):
    """Check that the process's peak memory grows by less than 64 MiB, and its peak address space by less than 1 GiB."""

    def memory(name):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets VmHWM, the peak of VmRSS
    used, reserved = memory("VmRSS"), memory("VmSize")
    yield
    assert memory("VmHWM") - used < 64 * MIB
    assert memory("VmPeak") - reserved < GIB
