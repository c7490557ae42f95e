"""The client's unfinished work, without a hub: what is sent when, and what a repetition changes."""

import pytest

from wfm_ds.transport.pending_submissions import (
    FULL_RETRY_S,
    MAX_IN_FLIGHT,
    PendingSubmissions,
    Submission,
    TaskRequest,
)


def submission(*ids):
    tasks = {task_id: TaskRequest(task_id, "any", i, i + 1, 10.0) for i, task_id in enumerate(ids)}
    return Submission([{}] * len(ids), [], [], tasks, set(tasks))


@pytest.fixture
def unfinished():
    unfinished = PendingSubmissions()
    for i in range(MAX_IN_FLIGHT + 2):
        unfinished.add(submission(f"{i}a", f"{i}b"))
    return unfinished


def sent(unfinished, now_s, again_s=2.0):
    """The first tasks of what is sent, in order."""
    first = []
    for due in unfinished.due_submissions(now_s):
        first.append(min(due.open_tasks))
        due.retry_at_s = now_s + again_s
    return first


def test_few_are_in_flight_and_each_that_is_accepted_makes_room_for_one(unfinished):
    assert sent(unfinished, 0.0) == [f"{i}a" for i in range(MAX_IN_FLIGHT)]
    assert sent(unfinished, 1.0) == []
    unfinished.mark_accepted(["0a", "unknown"])
    assert sent(unfinished, 1.0) == [], "one of its tasks is not accepted"
    unfinished.mark_accepted(["0b"])
    assert sent(unfinished, 1.0) == [f"{MAX_IN_FLIGHT}a"]
    assert sent(unfinished, 2.0) == [f"{i}a" for i in range(1, MAX_IN_FLIGHT)], "not accepted in time"


def test_a_full_hub_is_asked_later_and_a_new_one_at_once(unfinished):
    sent(unfinished, 0.0)
    unfinished.retry_later("1b", 5.0)
    assert "1a" not in sent(unfinished, 5.0 + FULL_RETRY_S / 2)
    assert "1a" in sent(unfinished, 5.0 + FULL_RETRY_S)
    unfinished.mark_accepted(["0a", "0b"])
    unfinished.resend_all()
    assert sent(unfinished, 6.1)[0] == "0a"


def test_a_task_ends_once_and_its_submission_with_the_last_of_them(unfinished):
    assert unfinished.drop_task("0a")
    assert not unfinished.drop_task("0a")
    assert sent(unfinished, 0.0)[0] == "0b"
    assert unfinished.drop_task("0b")
    assert not {"0a", "0b"} & set(unfinished.task_ids())
    unfinished.resend_all()
    assert sent(unfinished, 9.0)[0] == "1a"
