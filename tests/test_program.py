"""One way to be a command: exit codes, the one line of an error, and the modules that are commands."""

import argparse
import re
from pathlib import Path

import pytest

from wfm_ds.errors import DataError
from wfm_ds.program import CommandParser, run_command, run_with_exit_code

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "wfm_ds", ROOT / "reward" / "wfm_reward"]
SAYS_IT_ITSELF = re.compile(r'f"error: |except \(?\w*Error.*\n(?:.*\n)?.*(?:sys\.stderr\.write|return 2|sys\.exit)')
ONE_WAY = {"wfm_ds/program.py", "wfm_ds/distributed/lifecycle.py"}  # of a command, and of a rank among others


def parser():
    p = argparse.ArgumentParser(prog="a_command")
    p.add_argument("words", nargs="*")
    p.add_argument("--flag", action="store_true")
    return p


def refuse(args):
    raise DataError("the folder is empty: name another one")


def test_work_decides_the_exit_code_and_none_means_done():
    assert run_command(parser(), lambda args: None, []) == 0
    assert run_command(parser(), lambda args: 3, []) == 3


def test_options_may_stand_between_words():
    seen = []
    run_command(parser(), lambda args: seen.append((args.words, args.flag)), ["a", "--flag", "b"])
    assert seen == [(["a", "b"], True)]


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys):
    assert run_command(parser(), refuse, []) == 2
    assert capsys.readouterr() == ("", "error: the folder is empty: name another one\n")


def test_what_our_parser_refuses_is_a_mistake_like_any_other(capsys):
    p = CommandParser(prog="a_command")
    assert run_command(p, refuse, ["--no-such-option"]) == 2
    sentence = "unrecognized arguments: --no-such-option (see a_command --help)"
    assert capsys.readouterr() == ("", f"error: {sentence}\n")
    said = []
    assert run_command(p, refuse, ["--no-such-option"], fail=lambda text: said.append(text) or 7) == 7
    assert said == [sentence]


def test_a_wrong_option_is_exit_code_2():
    with pytest.raises(SystemExit) as left:
        run_command(parser(), refuse, ["--no-such-option"])
    assert left.value.code == 2


def test_a_file_that_cannot_be_used_is_the_users(tmp_path, capsys):
    missing = tmp_path / "none" / "page.md"
    assert run_with_exit_code(lambda: missing.write_text("")) == 2
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"


def test_a_rank_says_a_users_mistake_in_its_own_way_and_keeps_its_files(tmp_path):
    said = []
    assert run_command(parser(), refuse, [], fail=lambda sentence: said.append(sentence) or 7) == 7
    assert said == ["the folder is empty: name another one"]
    with pytest.raises(FileNotFoundError):
        run_with_exit_code(lambda: (tmp_path / "none" / "a").read_bytes(), fail=lambda sentence: 7)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(parser(), lambda args: 1 // 0, [])


def test_no_command_ends_by_a_users_mistake_on_its_own():
    own = [
        str(path.relative_to(ROOT))
        for folder in PACKAGES
        for path in sorted(folder.rglob("*.py"))
        if SAYS_IT_ITSELF.search(path.read_text())
    ]
    assert set(own) == ONE_WAY
