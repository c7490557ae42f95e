"""Lifecycle of a rank's process: signals, exit after the launcher has died, final status, and exit on errors."""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import psutil

from wfm_ds.distributed.ranks import find_launched_rank, read_rank
from wfm_ds.errors import UserError
from wfm_ds.program import USER_ERROR_CODE, print_error
from wfm_ds.storage import atomic

MAX_EXIT_CODE = 255
ORPHAN_EXIT_CODE = 77  # exit code of a rank after its launcher has died
PARENT_CHECK_INTERVAL_S = 5.0
EXIT_WAIT_S = 15.0  # time for the launcher to end a rank; it polls its ranks every second and ends them one by one


class StopFlag:
    """Records SIGTERM and SIGINT (stop) and SIGUSR1 (save) on this rank.

    A signal may not reach all ranks, so ranks must exchange their flags before they react.
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None  # the first SIGTERM or SIGINT
        self._save_requested = False

    @property
    def is_set(self) -> bool:
        return self.stop_signal is not None

    def raise_flag(self, number: int, frame: FrameType | None) -> None:
        self.stop_signal = self.stop_signal or signal.Signals(number)

    def request_save(self, number: int, frame: FrameType | None) -> None:
        self._save_requested = True

    def take_save_request(self) -> bool:
        """Return whether SIGUSR1 has arrived since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested


_STOP_FLAG = StopFlag()  # one per process, like the signal handlers


def install_signal_handlers() -> StopFlag:
    """Record SIGTERM, SIGINT and SIGUSR1 in the process's only StopFlag and return it.

    Call it in the main thread before heavy imports; until then, these signals kill the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _STOP_FLAG.raise_flag)
    signal.signal(signal.SIGUSR1, _STOP_FLAG.request_save)
    # launch.py blocks these two signals in DeepSpeed's processes, and the ranks inherit the blocked signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
    return _STOP_FLAG


def watch_parent(interval_s: float = PARENT_CHECK_INTERVAL_S) -> threading.Event | None:
    """Start a daemon thread that exits this process with code 77 when its parent or launcher has died.

    Returns an event that ends the thread, or None if no launcher started this process. Call this before `World.join`,
    which sets the variables by which launchers are recognized. Raises UserError if these variables contradict each
    other.
    """
    if find_launched_rank(os.environ) is None and "WFM_LAUNCH_PID" not in os.environ:
        return None
    parent_pid, launcher, stopping = os.getppid(), _find_launcher(), threading.Event()

    def watch() -> None:
        while not stopping.wait(interval_s):
            if os.getppid() != parent_pid or not _is_alive(launcher):
                _exit_orphan()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return stopping


def _find_launcher() -> psutil.Process | None:
    """Return the process of launch.py, or None if it did not start this rank here. Exit if it has died."""
    if "WFM_LAUNCH_PID" not in os.environ:
        return None
    try:
        return psutil.Process(int(os.environ["WFM_LAUNCH_PID"]))
    except psutil.NoSuchProcess:
        _exit_orphan()


def _exit_orphan() -> NoReturn:
    os.write(2, f"process {os.getpid()} exits: its launcher has died\n".encode())
    os._exit(ORPHAN_EXIT_CODE)  # the main thread may hang in a collective


def _is_alive(process: psutil.Process | None) -> bool:
    """Return whether the process runs. A zombie, or a new process with the same id, does not count."""
    if process is None:
        return True
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_since_start() -> float:
    """Return the seconds since this process started, including imports."""
    return time.time() - psutil.Process().create_time()


def write_status(status: Literal["finished", "preempted"], step: int) -> None:
    """Write the final status to WFM_STATUS_FILE, if this variable is set. Rank 0 calls this at the very end.

    launch.py treats a job that exits with code 0 without a status as failed.
    """
    if target := os.environ.get("WFM_STATUS_FILE"):
        atomic.write_text(Path(target), json.dumps({"status": status, "step": step}))


def read_preempted_code(environ: Mapping[str, str]) -> int:
    """Return WFM_PREEMPTED_CODE, the exit code of a preempted run (default 0). Raises UserError if it is invalid."""
    text = environ.get("WFM_PREEMPTED_CODE", "0")
    if not text.isdecimal() or int(text) > MAX_EXIT_CODE:
        raise UserError(f"WFM_PREEMPTED_CODE must be an exit code from 0 to {MAX_EXIT_CODE}, got {text!r}")
    return int(text)


def exit_with_user_error(message: str, *, prints: bool) -> NoReturn:
    """Print `error: MESSAGE` if `prints` is set, and exit with code 2. Raises SystemExit.

    All ranks must call this in their main thread. Ranks that do not print wait up to EXIT_WAIT_S seconds for the
    launcher to end them.
    """
    if prints:
        print_error(message)
    else:
        _wait_for_signal(EXIT_WAIT_S)
    raise SystemExit(USER_ERROR_CODE)


def fail_rank(message: str) -> NoReturn:
    """Exit because of a user error before the process group exists. The first rank of each node prints it.

    Ranks with contradictory launcher variables print it too.
    """
    try:
        launched = find_launched_rank(os.environ)
    except UserError:
        launched = None
    exit_with_user_error(message, prints=launched is None or launched.local_rank == 0)


def _wait_for_signal(timeout_s: float) -> None:
    """Wait up to `timeout_s` seconds for SIGTERM or SIGINT. Returns immediately if such a signal has already arrived.

    Uses a wake-up file descriptor. sigtimedwait would miss a signal that the kernel delivers to a torch thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        if not install_signal_handlers().is_set:
            select.select([reader], [], [], timeout_s)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def strip_launcher_args(argv: Sequence[str]) -> list[str]:
    """Return `argv` without `--local_rank=N`, `--local-rank=N` and `--local_rank N`, which launchers add."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank")
    return parser.parse_known_args(argv)[1]


def run_and_exit(program: Callable[[], int]) -> NoReturn:
    """Run `program`, and end the process with its exit code.

    Uses os._exit, because threads of gloo or NCCL may abort a normal interpreter shutdown with a different exit code.
    """
    try:
        code = program()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        logging.getLogger("wfm_ds").exception("the run failed")  # only rank 0 logs to the console
        if read_rank(os.environ) != 0:
            traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
