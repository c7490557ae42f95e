import io
import logging
import sys

from rich.console import Console

from each_case import check_each
from wfm_ds.monitoring.monitor import LINE_INTERVAL_S, ConsoleProgress, LineProgress, Pace, format_duration


def test_pace_knows_speed_and_time_left():
    pace = Pace(100, "images")
    pace.update(50.0, 0, 0)
    assert pace.format_text(0, "warming up") == "step 0/100, warming up"
    pace.update(60.0, 5, 200)
    assert pace.speed() == (0.5, 20.0)
    assert pace.format_text(5, "loss 0.1") == "step 5/100, 3:10 left, 20 images/s, loss 0.1"


def test_pace_forgets_the_slow_start():
    pace = Pace(1000, "images")
    pace.update(0.0, 0, 0)
    for step in range(1, 101):  # the first step compiles for an hour
        pace.update(3600.0 + step, step, 8)
    assert pace.speed() == (1.0, 8.0)


def test_pace_without_time_or_progress_says_nothing():
    pace = Pace(10, "images")
    for _ in range(2):
        pace.update(1.0, 3, 4)
        assert pace.speed() is None
    pace.update(2.0, 3, 4)
    assert pace.format_text(3) == "step 3/10"


@check_each(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_clock(seconds, text):
    assert format_duration(seconds) == text


def test_log_lines_are_the_first_the_last_and_one_per_interval(caplog):
    caplog.set_level(logging.INFO)
    progress = LineProgress(total_steps=100)
    for step in range(1, 41):  # one step a second
        progress.update(float(step), step, f"step {step}")
    progress.close()
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [f"step {1 + k * int(LINE_INTERVAL_S)}" for k in range(4)] + ["step 40"]


def test_log_line_of_the_last_step_comes_once(caplog):
    caplog.set_level(logging.INFO)
    progress = LineProgress(total_steps=2)
    progress.update(0.0, 1, "step 1")
    progress.update(0.1, 2, "step 2")
    progress.close()
    assert [record.getMessage() for record in caplog.records] == ["step 1", "step 2"]


def test_terminal_has_one_live_line_and_prints_the_rest_above_it(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = ConsoleProgress(Console(file=screen, force_terminal=True, width=100), total_steps=4)
    progress.update(0.0, 1, "step 1/4, reward [0.5]")
    sys.stderr.write("a warning\n")
    progress.update(1.0, 4, "step 4/4, done")
    progress.close()
    text = screen.getvalue()
    assert "a warning" in text  # through the console, not over the bar
    assert text.rstrip().removesuffix("\x1b[?25h").rstrip().endswith("step 4/4, done")
    assert "\x1b[?25h" in text  # the cursor is back
