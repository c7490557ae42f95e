"""Shared behaviour of all commands: parse arguments, run, print user errors as one line, return the exit code.

Exit codes: 0 success; 2 user error (one `error: ` line on stderr, no traceback), like argparse; 1 any other error, with
traceback. See distributed/lifecycle.py for the exit of multi-rank runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from wfm_ds.errors import UserError

USER_ERROR_CODE = 2

FailHandler = Callable[[str], int]
"""Prints the message of a user error and returns the exit code, or ends the process."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises UserError for invalid arguments, so that only one rank prints the message.

    argparse replaces `%(prog)s` in the epilog by the command that the user typed, so that examples can be copied.
    """

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def add_recipe_arguments(self) -> None:
        """Add the arguments RECIPE and section.key=value of commands that load a recipe."""
        self.add_argument("recipe", type=Path, help="recipe file (YAML), or name of a shipped recipe (see wfm recipes)")
        self.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the recipe")


def run_command(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], int | None],
    argv: Sequence[str] | None = None,
    *,
    fail: FailHandler | None = None,
) -> int:
    """Parse `argv` (default: sys.argv), run `work` with the arguments, and return the exit code.

    Options may appear before, between and after positional arguments. work: returns an exit code, or None for 0.
    fail: see `report_error`.
    """
    try:
        return work(parser.parse_intermixed_args(argv)) or 0
    except (UserError, OSError) as error:
        return report_error(error, fail)


def run_with_exit_code(work: Callable[[], int | None], *, fail: FailHandler | None = None) -> int:
    """Run `work` and return its exit code. fail: handles the message of a user error; see report_error."""
    try:
        return work() or 0
    except (UserError, OSError) as error:
        return report_error(error, fail)


def report_error(error: UserError | OSError, fail: FailHandler | None) -> int:
    """Print the message of a user error and return the exit code. Other errors are raised again.

    fail: function that is called with the message and returns the exit code. Default: print_error.
    Without `fail`, an OSError with a file name counts as a user error. With `fail`, every OSError is raised again,
    because it is unexpected on a single rank of a run.
    """
    if isinstance(error, UserError):
        return (fail or print_error)(str(error))
    if fail is not None or error.filename is None:  # without a file: e.g. a connection error
        raise error
    return print_error(f"{error.filename}: {error.strerror}")


def print_error(message: str) -> int:
    """Print `error: MESSAGE` to stderr, and return 2."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    return USER_ERROR_CODE
