"""Tests of `check_each`: all cases run, and the error names every failed case."""

import os
import sys

import pytest

from each_case import check_each


@check_each("a", [1, 2])
@check_each(("b", "text"), [(1, "x"), (2, "y")])
def test_each_case_has_its_own_fixtures(a, b, text, tmp_path, monkeypatch, capsys):
    assert list(tmp_path.iterdir()) == []
    (tmp_path / text).write_text(f"{a} {b}")
    assert "OF_A_CASE" not in os.environ
    monkeypatch.setenv("OF_A_CASE", text)
    assert capsys.readouterr().out == ""
    sys.stdout.write(text)


def test_all_cases_run_and_the_error_names_the_failed_ones():
    seen = []

    @check_each("number", range(4))
    def fails_if_odd(number):
        seen.append(number)
        assert number % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed") as caught:
        fails_if_odd()
    assert seen == [0, 1, 2, 3]
    assert [error.__notes__ for error in caught.value.exceptions] == [["case 1: number=1"], ["case 3: number=3"]]


def test_tests_without_cases_and_cases_with_marks_are_mistakes():
    with pytest.raises(AssertionError, match="no case of number"):
        check_each("number", [])
    with pytest.raises(AssertionError, match=r"marks of a case need pytest\.mark\.parametrize"):
        check_each("number", [pytest.param(1, marks=pytest.mark.slow)])
