"""All commands behave alike: exit codes, one-line errors, and the list of modules that are commands."""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from wfm_ds.errors import DataError
from wfm_ds.program import CommandParser, run_command, run_with_exit_code

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "wfm_ds", ROOT / "reward" / "wfm_reward"]
SAYS_IT_ITSELF = re.compile(r'f"error: |except \(?\w*Error.*\n(?:.*\n)?.*(?:sys\.stderr\.write|return 2|sys\.exit)')
ONE_WAY = {"wfm_ds/program.py"}


def parser():
    p = argparse.ArgumentParser(prog="a_command")
    p.add_argument("words", nargs="*")
    p.add_argument("--flag", action="store_true")
    return p


def refuse(args):
    raise DataError("the folder is empty: name another one")


def test_the_command_sets_the_exit_code_and_options_may_be_anywhere():
    seen = []
    assert run_command(parser(), lambda args: seen.append((args.words, args.flag)), ["a", "--flag", "b"]) == 0
    assert seen == [(["a", "b"], True)]
    assert run_command(parser(), lambda args: 3, []) == 3
    with pytest.raises(ZeroDivisionError):
        run_command(parser(), lambda args: 1 // 0, [])


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys):
    assert run_command(parser(), refuse, []) == 2
    assert capsys.readouterr() == ("", "error: the folder is empty: name another one\n")
    with pytest.raises(SystemExit) as left:
        run_command(parser(), refuse, ["--no-such-option"])
    assert left.value.code == 2


def test_names_in_messages_cannot_control_the_terminal(capsys):
    def refuse_hostile(args):
        raise DataError("\x1b[2J\x07 is no layer")

    assert run_command(parser(), refuse_hostile, []) == 2
    assert capsys.readouterr().err == "error: \\x1b[2J\\x07 is no layer\n"


def test_a_command_without_a_recipe_names_its_options(capsys):
    p = CommandParser(prog="a_command")
    p.key_options = {"data.prompt": "--prompt"}

    def refuse_captions(args):
        raise DataError("data.prompt.txt, me/data.prompt and data.prompts have no captions: set data.prompt.")

    assert run_command(p, refuse_captions, []) == 2
    said = "data.prompt.txt, me/data.prompt and data.prompts have no captions: set --prompt."
    assert capsys.readouterr().err == f"error: {said}\n"


def test_parser_errors_are_reported_like_other_user_errors(capsys):
    p = CommandParser(prog="a_command")
    assert run_command(p, refuse, ["--no-such-option"]) == 2
    sentence = "unrecognized arguments: --no-such-option (see a_command --help)"
    assert capsys.readouterr() == ("", f"error: {sentence}\n")
    said = []
    assert run_command(p, refuse, ["--no-such-option"], fail=lambda text: said.append(text) or 7) == 7
    assert said == [sentence]


def test_a_file_error_is_a_user_error(tmp_path, capsys):
    missing = tmp_path / "none" / "page.md"
    assert run_with_exit_code(lambda: missing.write_text("")) == 2
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"


def test_a_rank_reports_a_user_error_and_keeps_its_files(tmp_path):
    said = []
    assert run_command(parser(), refuse, [], fail=lambda sentence: said.append(sentence) or 7) == 7
    assert said == ["the folder is empty: name another one"]
    with pytest.raises(FileNotFoundError):
        run_with_exit_code(lambda: (tmp_path / "none" / "a").read_bytes(), fail=lambda sentence: 7)


def test_no_command_ends_by_a_users_mistake_on_its_own():
    own = [
        str(path.relative_to(ROOT))
        for folder in PACKAGES
        for path in sorted(folder.rglob("*.py"))
        if SAYS_IT_ITSELF.search(path.read_text())
    ]
    assert set(own) == ONE_WAY


SHOW_ERROR = """
import sys
from wfm_ds.program import print_error
print_error("no\\x1b[2Jway")
"""


def read_error(stderr, **environment):
    """Print an error in a process with stderr `file`, `pipe` or `terminal`. Return what it printed."""
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    reader, writer = pty.openpty() if stderr == "terminal" else os.pipe()
    with tempfile.TemporaryFile() as file:
        target = file if stderr == "file" else writer
        subprocess.run(
            [sys.executable, "-c", SHOW_ERROR],
            stderr=target,
            check=True,
            env={**variables, "TERM": "xterm", **environment},
        )
        os.close(writer)
        file.seek(0)
        told = file.read() if stderr == "file" else os.read(reader, 1000)
    os.close(reader)
    return told.decode().rstrip()


def test_an_error_is_red_only_on_a_terminal():
    plain, red = "error: no\\x1b[2Jway", "\x1b[1;31merror:\x1b[0m no\\x1b[2Jway"
    assert read_error("terminal") == red
    assert read_error("terminal", NO_COLOR="1", FORCE_COLOR="1") == plain
    assert read_error("terminal", TERM="dumb") == plain
    assert read_error("pipe") == plain
    assert read_error("pipe", FORCE_COLOR="1") == red
    assert read_error("file", FORCE_COLOR="1") == plain
