"""Progress of waits: a bar on a terminal, else lines, on rank 0 only, and nothing for short waits."""

import logging
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from each_case import check_each
from wfm_ds.distributed import progress
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.logs import close_logging, setup_logging
from wfm_ds.distributed.progress import format_progress, show_wait, track_progress
from wfm_ds.distributed.ranks import LaunchedRank


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)


def read_lines(capsys, items=(1, 2, 3)):
    with track_progress(items, "encoding texts", total=len(items)) as tracked:
        assert list(tracked) == list(items)
    return capsys.readouterr().err.splitlines()


@check_each(
    ("done", "total", "elapsed_s", "text"),
    [
        (30, 120, 30.0, "work: 30 of 120, 1:30 left"),
        (1, 3, 3600.0, "work: 1 of 3, 2:00:00 left"),
        (0, 3, 5.0, "work: 0 of 3"),
        (0, None, 65.0, "work: 1:05 so far"),
    ],
)
def test_a_line_has_the_count_and_the_remaining_time(done, total, elapsed_s, text):
    assert format_progress("work", done, total, elapsed_s) == text


def test_without_a_terminal_there_are_lines_and_only_on_rank_0(short_waits, capsys, monkeypatch):
    before = LIVENESS.num_advances
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a command without a run
    assert read_lines(capsys) == [f"encoding texts: {n} of 3, 0:00 left" for n in (1, 2, 3)]
    assert LIVENESS.num_advances == before + 3
    for name, value in LaunchedRank(1, 2, 1, 2, "127.0.0.1", 29500, "torchrun").variables().items():
        monkeypatch.setenv(name, value)
    assert read_lines(capsys) == []


def test_a_pipe_is_no_terminal_even_if_colors_are_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in many CI systems
    assert progress.open_console() is None


def test_a_run_logs_the_lines_unless_its_console_is_off(short_waits, capsys):
    for console, count in ((True, 3), (False, 0)):
        setup_logging(None, 0, console=console)
        try:
            assert len(read_lines(capsys)) == count
        finally:
            close_logging()


def test_a_short_wait_shows_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    assert read_lines(capsys) == []


def test_a_wait_of_unknown_length_shows_that_it_still_runs(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown = ""
    with show_wait("loading a model"):
        deadline = time.monotonic() + 20
        while not shown and time.monotonic() < deadline:
            shown = capsys.readouterr().err
    assert shown.splitlines()[0] == "loading a model: 0:00 so far"
    capsys.readouterr()
    assert not [thread for thread in progress.threading.enumerate() if thread.name == "wait"]


SHOW_BAR = """
import sys
from wfm_ds.distributed import progress
progress.SHOW_AFTER_S = 0.0
try:
    with progress.track_progress(range(3), "encoding texts", total=3) as tracked:
        for number in tracked:
            if number == 2:
                raise ValueError
except ValueError as error:
    sys.stderr.write("the error\\n")
"""


SHOW_TWO_BARS = """
from wfm_ds.distributed import progress
from wfm_ds.monitoring.monitor import ConsoleProgress
progress.SHOW_AFTER_S = 0.0
training = ConsoleProgress(progress.open_console(), 10)
training.update(0.0, 1, "training: step 1")
with progress.track_progress(range(2), "saving the checkpoint", total=2) as tracked:
    for number in tracked:
        training._bar.refresh()  # else only four times per second
training.close()
"""


def run_in_terminal(code):
    """Run Python code with a terminal as stderr, and return what it shows."""
    reader, writer = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=writer, check=True, env={**os.environ, "TERM": "xterm"})
    os.close(writer)
    shown = os.read(reader, 100_000).decode()
    os.close(reader)
    return shown


def test_a_terminal_has_a_bar_that_an_error_removes():
    shown = run_in_terminal(SHOW_BAR)
    assert re.search(r"encoding texts.*2/3", shown)
    bar, _, rest = shown.rpartition("the error")
    assert bar.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in bar  # the cursor is shown again before the error
    assert "encoding" not in rest


def test_the_bar_of_a_wait_is_below_the_bar_of_the_training():
    assert re.search(r"training: step 1[^\n]*\n[^\n]*saving the checkpoint.*1/2", run_in_terminal(SHOW_TWO_BARS))
