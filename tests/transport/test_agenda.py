"""PriorityQueue, compared with a plain dict that is sorted on every read."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wfm_ds.transport.priority_queue import MIN_STALE_ENTRIES, PriorityQueue

keys = st.integers(0, 9)
places = st.integers(0, 20)


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.agenda = PriorityQueue()
        self.plain = {}  # key -> (place, turn)
        self.turn = 0

    def sorted(self):
        return sorted(self.plain, key=self.plain.get)

    @rule(key=keys, place=places)
    def put(self, key, place):
        self.turn += 1
        self.plain[key] = (place, self.turn)
        self.agenda.put(key, place)

    @rule(key=keys)
    def discard(self, key):
        self.plain.pop(key, None)
        self.agenda.discard(key)

    @rule(before=places)
    def due(self, before):
        want = [key for key in self.sorted() if self.plain[key][0] < before]
        assert self.agenda.pop_due(before) == want
        for key in want:
            del self.plain[key]

    @invariant()
    def equal(self):
        assert len(self.agenda) == len(self.plain)
        assert {key for key in range(10) if key in self.agenda} == self.plain.keys()
        assert self.agenda.peek() == next(iter(self.sorted()), None)


TestAgenda = Model.TestCase


def test_removed_entries_do_not_accumulate():
    agenda = PriorityQueue()
    agenda.put("a first one that stays", -1.0)
    for number in range(10_000):
        agenda.put("moves on", float(number))
        agenda.put(number, 1e9)
        agenda.discard(number)
    assert len(agenda) == 2
    assert len(agenda._heap) <= 2 * len(agenda) + MIN_STALE_ENTRIES
    assert agenda.pop_due(1e9) == ["a first one that stays", "moves on"]
