"""Lines by reason: at most one a minute each, and every event is in a line or in a count."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from wfm_ds.transport.throttle import LogThrottle

EVERY_S, MAX_REASONS = 60.0, 3


def throttled(lines):
    return LogThrottle(lines.append, interval_s=EVERY_S, max_reasons=MAX_REASONS)


def test_the_first_is_told_at_once_and_the_others_are_counted():
    lines = []
    throttle = throttled(lines)
    for number in range(1000):
        throttle.log("bad header", f"dropped {number}", number / 100)
    assert lines == ["dropped 0"]
    throttle.flush_due(59.9)
    assert len(lines) == 1
    throttle.flush_due(60.0)
    assert lines[1:] == ["dropped 999 (bad header: 999 more in 60 s)"]
    throttle.log("bad header", "dropped 1000", 61.0)
    throttle.flush_due(120.0)
    assert lines[2:] == ["dropped 1000 (bad header: 1 more in 60 s)"]


def test_a_reason_that_was_quiet_for_a_minute_is_told_at_once():
    lines = []
    throttle = throttled(lines)
    for now_s in (0.0, 61.0):
        throttle.log("bad header", f"at {now_s:g}", now_s)
    assert lines == ["at 0", "at 61"]


def test_each_reason_has_lines_of_its_own_and_invented_ones_share_theirs():
    lines = []
    throttle = throttled(lines)
    for number in range(500):
        throttle.log(f"reason {number}", f"line {number}", 1.0)
    assert lines == ["line 0", "line 1", "line 2", "line 3"]
    throttle.close(2.0)
    assert lines[4:] == ["line 499 (other reasons: 496 more in 1 s)"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0.0, 40.0)), max_size=200))
def test_nothing_is_lost_and_no_minute_has_two_lines_of_a_reason(events):
    lines = []
    throttle = throttled(lines)
    now_s, told = 0.0, []
    for reason, wait_s in events:
        now_s += wait_s
        before = len(lines)
        throttle.log(reason, reason, now_s)
        told += [(now_s, line) for line in lines[before:]]
    throttle.close(now_s)
    counts = [re.search(r": (\d+) more", line) for line in lines]
    assert sum(int(count[1]) if count else 1 for count in counts) == len(events)
    for at_s, _ in told:
        assert sum(at_s <= other_s < at_s + EVERY_S for other_s, _ in told) <= 2 * (MAX_REASONS + 1)
