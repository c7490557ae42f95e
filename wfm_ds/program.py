"""Shared behaviour of all commands: parse arguments, run, print user errors as one line, return the exit code.

Exit codes: 0 success; 2 user error (one `error: ` line on stderr, no traceback), like argparse; 1 any other error, with
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from wfm_ds.errors import UserError, escape_controls

USER_ERROR_CODE = 2
RED_LABEL = "\x1b[1;31merror:\x1b[0m"

JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that SLURM sends to all processes of a job: to stop it, or to save a checkpoint."""

FailHandler = Callable[[str], int]
"""Function that prints the message of a user error and returns the exit code, or ends the process."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises UserError for invalid arguments, so that only one rank of a run prints the error.

    argparse replaces `%(prog)s` in the epilog by the command that the user typed.
    """

    key_options: Mapping[str, str] = {}
    """{recipe key: option}, for commands without a recipe. Error messages name the option instead of the key."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def add_recipe_arguments(self) -> None:
        """Add the arguments RECIPE and section.key=value, for commands that load a recipe."""
        self.add_argument("recipe", type=Path, help="recipe file (YAML), or name of a shipped recipe (see wfm recipes)")
        self.add_argument(
            "overrides", nargs="*", default=[], metavar="section.key=value", help="values that override the recipe"
        )


def run_command(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    fail: FailHandler | None = None,
) -> int:
    """Parse `argv` (default: sys.argv), run `work` with the arguments, and return the exit code.

    Options may appear before, between and after positional arguments. work: returns an exit code, or None for 0. fail:
    see `run_with_exit_code`.
    """
    key_options: Mapping[str, str] = getattr(parser, "key_options", {})
    return run_with_exit_code(lambda: work(parser.parse_intermixed_args(argv)), fail=fail, key_options=key_options)


def run_with_exit_code(
    work: Callable[[], int | None], *, fail: FailHandler | None = None, key_options: Mapping[str, str] | None = None
) -> int:
    """Run `work` and return its exit code. After a user error, print its message and return 2.

    fail: called with the message of a user error instead of printing it. It returns the exit code. key_options: see
    CommandParser. Without `fail`, an OSError with a file name counts as a user error. With `fail`, every OSError is
    raised.
    """
    try:
        return work() or 0
    except UserError as error:
        message = str(error)
        for key, option in (key_options or {}).items():
            # Not within a file name or a longer key.
            message = re.sub(rf"(?<![\w./-]){re.escape(key)}(?!\w|\.\w)", option, message)
        return (fail or print_error)(message)
    except OSError as error:
        # Ranks pass `fail`: any OSError there is unexpected. An OSError without a file is e.g. a connection error.
        if fail is not None or error.filename is None:
            raise
        return print_error(f"{error.filename}: {error.strerror}")


@contextlib.contextmanager
def collect_garbage_rarely() -> Iterator[None]:
    """Make Python collect garbage less often inside the context, to start commands faster."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextlib.contextmanager
def block_job_signals() -> Iterator[None]:
    """Block JOB_SIGNALS in this thread, and in processes that it starts until they call `ignore_job_signals`."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def ignore_job_signals() -> None:
    """Ignore JOB_SIGNALS in this process, but not in its child processes. Call this in the main thread.

    The parent ends this process by closing its stdin instead.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def print_error(message: str) -> int:
    text = f"error: {escape_controls(message)}\n"
    sys.stderr.write(RED_LABEL + text.removeprefix("error:") if shows_color() else text)
    sys.stderr.flush()
    return USER_ERROR_CODE


def shows_color() -> bool:
    """Return whether stderr shows colors: on a terminal, or with FORCE_COLOR on a pipe, unless NO_COLOR is set."""
    from rich.console import Console

    console = Console(stderr=True)
    try:
        is_file = stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):  # replaced by an object without a file descriptor
        is_file = False
    return console.color_system is not None and not console.no_color and not is_file
