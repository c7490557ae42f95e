"""One way to be a command: read the arguments, do the work, say a user's mistake in one sentence, return the exit code.

The exit codes of every command: 0 done; 2 a user's mistake (one `error: ` line on stderr, no traceback), which argparse
uses too; 1 anything else, with its traceback. How a rank ends a run of several is distributed/lifecycle.py's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from wfm_ds.errors import UserError

USER_ERROR = 2

Fail = Callable[[str], int]
"""Say that a user's mistake ends the command, and return the exit code (or end the process with it)."""


class Parser(argparse.ArgumentParser):
    """A parser whose refusal is a user's mistake like any other: one sentence, said once however many ranks there are.

    The words `%(prog)s` of its epilog become the command as it was typed, so that an example can be pasted.
    """

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help shows what there is)")


def program(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    fail: Fail | None = None,
) -> int:
    """Parse `argv` (by default the process's own), run `work` on it, and return the exit code.

    Options may stand between and behind the positional words. `work` returns an exit code of its own, or None for 0.
    """
    return exit_code(lambda: work(parser.parse_intermixed_args(argv)), fail=fail)


def exit_code(work: Callable[[], int | None], *, fail: Fail | None = None) -> int:
    """Run `work` and return its exit code; a UserError goes to `fail`, say_error without one.

    A file that cannot be read or written is the user's mistake too, unless `fail` is given: what one rank alone cannot
    do is for the run to judge.
    """
    try:
        return work() or 0
    except UserError as error:
        return (fail or say_error)(str(error))
    except OSError as error:
        if fail is not None or error.filename is None:  # without a file: a connection, or a mistake of ours
            raise
        return say_error(f"{error.filename}: {error.strerror}")


def say_error(sentence: str) -> int:
    """Write the sentence as an `error: ` line on stderr and return the exit code for it."""
    sys.stderr.write(f"error: {sentence}\n")
    sys.stderr.flush()
    return USER_ERROR
