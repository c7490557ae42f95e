"""Life of a rank process under its launcher: stop on request, end with its parents, report, fail with one message.

launch.py is the other side: it forwards signals, sets WFM_LAUNCH_PID and WFM_STATUS_FILE, and judges the exit.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import psutil

from wfm_ds.program import USER_ERROR

ORPHANED = 77  # exit code of a rank whose launcher is gone
PARENT_CHECK_S = 5.0
END_WAIT_S = 15.0  # the launcher looks at its ranks every second, then ends them one after the other


class StopFlag:
    """Up once SIGTERM or SIGINT came; and whether SIGUSR1 asked for a checkpoint. Local facts: ranks must agree on them
    before they act on them."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._save = False

    @property
    def is_set(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str | None:
        """SIGTERM or SIGINT, whichever came first; None before that."""
        return None if self._signal is None else self._signal.name

    def raise_flag(self, number: int, frame: FrameType | None) -> None:
        """A signal handler, and nothing but an assignment: the launcher may send the signal again at any time."""
        if self._signal is None:
            self._signal = signal.Signals(number)

    def ask_for_save(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self._save = True

    def take_save(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        asked, self._save = self._save, False
        return asked


_STOP = StopFlag()  # signals belong to the process, so there is one


def install_signal_handlers() -> StopFlag:
    """Make SIGTERM and SIGINT only raise the returned flag, and SIGUSR1 ask it for a save; the same flag at every call.

    Call it from the main thread before heavy imports: until then a signal kills the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _STOP.raise_flag)
    signal.signal(signal.SIGUSR1, _STOP.ask_for_save)
    return _STOP


class ParentWatch:
    """A daemon thread that ends this process with code 77 when its parent or its launcher is gone.

    Needed because a killed launcher (kill -9, out of memory) takes no rank with it: without this, ranks would hold
    the devices for ever. `os._exit`, because the main thread may hang in a collective.
    """

    def __init__(self, interval_s: float) -> None:
        self._parent_pid = os.getppid()
        self._launcher = _launcher_process()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval_s,), name="parent-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch; returns when the thread has ended."""
        self._stopped.set()
        self._thread.join(timeout=END_WAIT_S)

    def _watch(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            if os.getppid() != self._parent_pid or not _is_alive(self._launcher):
                os.write(2, f"process {os.getpid()} ends: its launcher is gone\n".encode())
                os._exit(ORPHANED)


def watch_parent(interval_s: float = PARENT_CHECK_S) -> ParentWatch | None:
    """Start the watch if a launcher started this process, else return None: a run from a shell may outlive it.

    Call it before `World.join`, which gives a lone process the environment of a rank.
    """
    if "LOCAL_RANK" not in os.environ and "WFM_LAUNCH_PID" not in os.environ:
        return None
    return ParentWatch(interval_s)


def _launcher_process() -> psutil.Process | None:
    """The process of WFM_LAUNCH_PID; None under the stock launcher or on another node, where it is not set."""
    if "WFM_LAUNCH_PID" not in os.environ:
        return None
    try:
        return psutil.Process(int(os.environ["WFM_LAUNCH_PID"]))
    except psutil.NoSuchProcess:
        os.write(2, f"process {os.getpid()} ends: its launcher is gone\n".encode())
        os._exit(ORPHANED)


def _is_alive(process: psutil.Process | None) -> bool:
    """Return whether it runs: not another one with its id, and not a zombie that nobody has reaped."""
    if process is None:
        return True
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_since_start() -> float:
    """Seconds since this process was started, imports included."""
    return time.time() - psutil.Process().create_time()


def write_status(status: Literal["finished", "preempted"], step: int) -> None:
    """Tell the launcher that all is done; rank 0's very last act. Without WFM_STATUS_FILE (stock launcher): nothing.

    A job of wfm_ds that exits with 0 but wrote no status counts as failed.
    """
    target = os.environ.get("WFM_STATUS_FILE")
    if not target:
        return
    part = Path(target + ".part")
    part.write_text(json.dumps({"status": status, "step": step}))
    part.replace(target)


def user_error_exit(message: str, rank: int, *, speaks: bool | None = None) -> NoReturn:
    """End a run that a user's mistake makes impossible: `error: MESSAGE` once on stderr, exit code 2.

    Every rank calls it, from its main thread. Rank 0 (or the one that `speaks`, where the mistake shows on one rank
    alone) writes and exits, upon which the launcher ends the others; they wait for that, so that no other exit is seen
    first, and say nothing. Raises SystemExit.
    """
    if speaks if speaks is not None else rank == 0:
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
    else:
        _wait_for_signal(END_WAIT_S)
    raise SystemExit(USER_ERROR)


def fail_as_rank(message: str) -> NoReturn:
    """End this rank by a mistake that all ranks see alike, such as one in the recipe, before they know each other."""
    user_error_exit(message, int(os.environ.get("RANK", "0")))


def _wait_for_signal(timeout_s: float) -> None:
    """Return at SIGTERM or SIGINT, past ones included, or after `timeout_s`.

    Not sigtimedwait: torch's threads do not block the signal, so the kernel may hand it to one of them. The wake-up
    descriptor is written to whichever thread gets it.
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
    """The arguments without `--local_rank=N` (or `--local-rank`, or with N as the next word), which launchers add."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in ("--local_rank", "--local-rank"):
            skip = not equals
        else:
            kept.append(word)
    return kept


def entry(program: Callable[[], int]) -> NoReturn:
    """Run it and leave with its exit code, whatever threads of gloo or NCCL still live.

    An ordinary exit tears the interpreter down around them, and they may abort the process with a code of their own.
    """
    try:
        code = program()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Exception:
        logging.getLogger("wfm_ds").exception("the run failed")  # the console is rank 0's
        if os.environ.get("RANK", "0") != "0":
            traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
