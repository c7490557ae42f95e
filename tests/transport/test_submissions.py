"""throttling of logs."""

import itertools
import logging

from wfm_ds.transport.sockets import MAX_STEP_S, ActiveClock
from wfm_ds.transport.submissions import (
    FULL_RETRY_S,
    MARKER_INTERVAL_S,
    MAX_IN_FLIGHT,
    MAX_OPEN_REQUESTS,
    PayloadRequest,
    PayloadRequests,
    PendingSubmissions,
    Submission,
    TaskRequest,
)
from wfm_ds.transport.throttle import LOG_INTERVAL_S, RepeatFilter, get_throttled_logger


def unfinished():
    """Return two more submissions than may be in flight, with two tasks each."""
    pending = PendingSubmissions()
    for i in range(MAX_IN_FLIGHT + 2):
        tasks = {f"{i}{x}": TaskRequest(f"{i}{x}", "any", row, row + 1, 10.0) for row, x in enumerate("ab")}
        pending.add(Submission([{}] * 2, 0, [], [], tasks, set(tasks)))
    return pending


def sent(pending, now_s, again_s=2.0):
    """Return the first task of each submission that is due, in order."""
    first = []
    for due in pending.due_submissions(now_s):
        first.append(min(due.open_tasks))
        due.retry_at_s = now_s + again_s
    return first


def test_the_number_of_submissions_in_flight_is_limited():
    pending = unfinished()
    assert sent(pending, 0.0) == [f"{i}a" for i in range(MAX_IN_FLIGHT)]
    pending.mark_accepted(["0a", "unknown"])
    assert sent(pending, 1.0) == [], "one of its tasks is not accepted"
    pending.mark_accepted(["0b"])
    assert sent(pending, 1.0) == [f"{MAX_IN_FLIGHT}a"]
    assert sent(pending, 2.0) == [f"{i}a" for i in range(1, MAX_IN_FLIGHT)], "not accepted in time"


def test_a_full_broker_gets_submissions_later_and_a_new_one_at_once():
    pending = unfinished()
    sent(pending, 0.0)
    pending.retry_later("1b", 5.0)
    assert "1a" not in sent(pending, 5.0 + FULL_RETRY_S / 2)
    assert "1a" in sent(pending, 5.0 + FULL_RETRY_S)
    pending.mark_accepted(["0a", "0b"])
    pending.resend_all()
    assert sent(pending, 6.1)[0] == "0a"


def test_a_submission_ends_with_its_last_task():
    pending = unfinished()
    assert [pending.drop_task(task_id) for task_id in ("0a", "0a", "0b")] == [True, False, True]
    assert not {"0a", "0b"} & set(pending.task_ids())
    pending.resend_all()
    assert sent(pending, 9.0)[0] == "1a"


def test_open_requests_are_limited_and_only_lost_ones_are_repeated():
    times, requests, is_open, seen = itertools.count(), PayloadRequests("me"), True, []

    def send(message_type, fields):
        if is_open:
            seen.append(fields["id"] if message_type == "fetch" else tuple(fields["ids"]))
        return is_open

    def sends(interval_s=0.001):
        """Return the ids that are sent at the next time."""
        seen.clear()
        requests.send(next(times) * interval_s, send)
        return list(seen)

    requests.add({name: PayloadRequest("fetch", {"id": name}) for name in "abcdefgh"})
    is_open = False
    assert sends() == []
    is_open = True
    assert sends() == [*"abcdefgh"[:MAX_OPEN_REQUESTS], ("me/0",)]
    assert requests.close("a")
    assert not requests.close("a")
    assert sends() == ["abcdefgh"[MAX_OPEN_REQUESTS]], "few are open at once"
    requests.on_released(["t/1", "me/0", "other/7", "me/x"])
    assert sends() == list("bcd"), "e came after the mark"
    requests.on_released(["me/0"])
    assert sends() == [], "so did they, the second time"
    for _ in range(100):
        (mark,) = sends(MARKER_INTERVAL_S * 1.01)
        assert mark[0].startswith("me/"), "time alone repeats only marks, which may be lost as well"


def test_the_clock_does_not_count_suspended_time():
    clock = ActiveClock(100.0)
    assert [clock.tick(now_s) for now_s in (100.5, 101.0)] == [100.5, 101.0]
    assert clock.tick(1000.0) == 101.0 + MAX_STEP_S
    assert clock.tick(1000.5) == 101.5 + MAX_STEP_S == clock.now_s


def test_repeated_log_lines_are_counted_and_logged_once_a_minute(caplog):
    clock, log = [0.0], logging.getLogger("test.throttle")
    log.addFilter(RepeatFilter(lambda: clock[0]))
    for number in range(1000):
        log.warning("dropped %d", number)
    log.warning("another %s", "thing")
    for clock[0] in (LOG_INTERVAL_S - 0.1, LOG_INTERVAL_S, 3 * LOG_INTERVAL_S):
        log.warning("dropped %d", clock[0])
    assert caplog.messages == ["dropped 0", "another thing", "dropped 60 (1000 more in the last 60 s)", "dropped 180"]
    assert len(get_throttled_logger("test.once").filters) == len(get_throttled_logger("test.once").filters) == 1
