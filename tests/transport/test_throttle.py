"""Log lines that peers cause: one a minute of each kind, with the number of the others."""

import logging

from wfm_ds.transport.throttle import LOG_INTERVAL_S, RepeatFilter, get_throttled_logger


def test_one_line_a_minute_of_each_kind_and_a_count_of_the_others(caplog):
    clock, log = [0.0], logging.getLogger("test.throttle")
    log.addFilter(RepeatFilter(lambda: clock[0]))
    for number in range(1000):
        log.warning("dropped %d", number)
    log.warning("another %s", "thing")
    for clock[0] in (LOG_INTERVAL_S - 0.1, LOG_INTERVAL_S, 3 * LOG_INTERVAL_S):
        log.warning("dropped %d", clock[0])
    assert caplog.messages == ["dropped 0", "another thing", "dropped 60 (1000 more in the last 60 s)", "dropped 180"]


def test_a_logger_is_throttled_once():
    assert get_throttled_logger("test.once") is get_throttled_logger("test.once")
    assert len(get_throttled_logger("test.once").filters) == 1
