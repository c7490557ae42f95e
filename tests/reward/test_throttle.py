"""Log lines that clients cause: one a minute for each kind."""

import logging

import pytest
from aiohttp.http_exceptions import BadStatusLine
from wfm_reward.web.log_throttle import ThrottleFilter, get_throttled_logger

from wfm_ds.transport.throttle import LOG_INTERVAL_S


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def log(clock):
    logger = logging.getLogger("test.throttle")
    throttle = ThrottleFilter(lambda: clock[0])
    logger.addFilter(throttle)
    yield logger
    logger.removeFilter(throttle)


def test_one_line_a_minute_of_each_kind_and_a_count_of_the_others(log, clock, caplog):
    for number in range(1000):
        log.warning("connection %d is refused", number)
    log.warning("another %s", "thing")
    clock[0] = LOG_INTERVAL_S - 0.1
    log.warning("connection %d is refused", 1000)
    clock[0] = LOG_INTERVAL_S
    log.warning("connection %d is refused", 1001)
    assert caplog.messages == [
        "connection 0 is refused",
        "another thing",
        "connection 1000 is refused (connection %d is refused: 1000 more in 60 s)",
    ]


def test_a_request_that_cannot_be_parsed_is_one_line_and_our_own_error_keeps_its_traceback(log, caplog):
    for kind, error in (("parsing %s", BadStatusLine("GET\n/ HTTP")), ("failing %s", ValueError("a mistake of ours"))):
        try:
            raise error
        except (BadStatusLine, ValueError):
            log.exception(kind, "x")
    first, second = caplog.records
    assert (first.exc_info, "\n" in first.getMessage(), "GET" in first.getMessage()) == (None, False, True)
    assert second.exc_info[1].args == ("a mistake of ours",)


def test_a_logger_is_throttled_once():
    assert get_throttled_logger("test.once") is get_throttled_logger("test.once")
    assert len(get_throttled_logger("test.once").filters) == 1
