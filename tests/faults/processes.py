"""What the tests of this folder do to processes, and how they wait for what comes of it."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

PATIENCE_S = 60.0  # ends a hang; a busy machine is no failure
MIB, GIB = 2**20, 2**30


def until(condition, patience_s=PATIENCE_S):
    """What it returned, once that is true. Fails after patience_s."""
    deadline_s = time.monotonic() + patience_s
    tick = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it did not happen"
        tick.wait(0.02)
    return value


def stop(*pids):
    """SIGSTOP; returns when they stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))


def go_on(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def wait(seconds):
    """For what is about time itself: longer than somebody's deadline."""
    threading.Event().wait(seconds)


@contextmanager
def modest(process):
    """Meanwhile the process uses less than 64 MiB more of memory at any time, and reserves less than 1 GiB."""

    def memory(name):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # VmHWM, the peak of VmRSS, begins anew
    used, reserved = memory("VmRSS"), memory("VmSize")
    yield
    assert memory("VmHWM") - used < 64 * MIB
    assert memory("VmPeak") - reserved < GIB
