"""Requests for payloads are repeated when they are proven lost, and not before."""

import pytest

from wfm_ds.transport.payload_requests import MARKER_INTERVAL_S, MAX_OPEN_REQUESTS, PayloadRequest, PayloadRequests


class Wire:
    """Records what was sent since it was last read."""

    def __init__(self):
        self.sent, self.open = [], True

    def __call__(self, message_type, fields):
        if self.open:
            self.sent.append(fields["id"] if message_type == "fetch" else tuple(fields["ids"]))
        return self.open

    def look(self):
        found, self.sent = self.sent, []
        return found


@pytest.fixture
def wire():
    return Wire()


def asked(*names):
    requests = PayloadRequests("me")
    requests.add({name: PayloadRequest("fetch", {"id": name}) for name in names})
    return requests


def test_time_alone_repeats_nothing(wire):
    requests = asked("a", "b")
    for now_s in range(100):
        requests.send(MARKER_INTERVAL_S * now_s * 1.01, wire)
    sent = wire.look()
    assert [name for name in sent if isinstance(name, str)] == ["a", "b"]
    assert len(sent) == 102, "the marks may be lost as well: they go on"


def test_what_an_answered_mark_has_overtaken_is_sent_again_and_nothing_later(wire):
    requests = asked("a", "b")
    requests.send(0.0, wire)
    assert wire.look() == ["a", "b", ("me/0",)]
    assert requests.close("a")
    requests.add({"c": PayloadRequest("fetch", {"id": "c"})})
    requests.send(1.0, wire)
    assert wire.look() == ["c"]
    requests.on_released(["t/1", "me/0", "other/7", "me/x"])
    requests.send(2.0, wire)
    assert wire.look() == ["b"], "c came after the mark"
    requests.on_released(["me/0"])
    requests.send(3.0, wire)
    assert wire.look() == [], "so did b, the second time"
    assert not requests.close("a")


def test_few_are_open_at_once(wire):
    requests = asked(*"abcdefgh")
    requests.send(0.0, wire)
    assert wire.look()[:-1] == list("abcdefgh"[:MAX_OPEN_REQUESTS])
    requests.close("b")
    requests.send(1.0, wire)
    assert wire.look() == ["abcdefgh"[MAX_OPEN_REQUESTS]]


def test_what_cannot_be_sent_is_tried_again(wire):
    requests = asked("a")
    wire.open = False
    requests.send(0.0, wire)
    wire.open = True
    requests.send(0.1, wire)
    assert wire.look() == ["a", ("me/0",)]
