"""Packing by length: every conversation is in exactly one row, and no row is too long."""

from hypothesis import given
from hypothesis import strategies as st

from wfm_ds.language import sequence_source
from wfm_ds.language.sequence_source import PackingOrder, pack_items

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)


@given(LENGTHS)
def test_every_item_is_in_one_row_that_it_fits(lengths):
    rows = pack_items(lengths, 64)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    sums = [sum(lengths[item] for item in row) for row in rows]
    assert max(sums) <= 64
    # No two rows fit into one. This holds for every fit that opens a new row only if necessary.
    assert all(a + b > 64 for i, a in enumerate(sums) for b in sums[i + 1 :])


def test_the_fullest_row_that_has_room_gets_an_item():
    assert pack_items([6, 5, 4, 3], 9) == [[0, 3], [1, 2]]
    assert pack_items([], 9) == []


def order(lengths, **options):
    return PackingOrder(lengths, 64, **{"seed": 3, "shuffle": True, "pack": True, **options})


@given(LENGTHS)
def test_an_epoch_shows_every_conversation_once_in_any_order_of_requests(lengths):
    rows = order(lengths)
    places, position = [], 0
    while rows.locate(position)[0] < 2:
        places.append((rows.locate(position), rows.conversations(position)))
        position += 1
    for epoch in range(2):
        shown = [item for (of, _), row in places if of == epoch for item in row]
        assert sorted(shown) == list(range(len(lengths)))
    fresh = order(lengths)
    assert [(fresh.locate(k), fresh.conversations(k)) for k in reversed(range(position))] == places[::-1]


def test_epochs_and_seeds_have_different_orders_only_with_shuffle():
    lengths = [30] * 40
    first = [order(lengths).conversations(k) for k in range(20)]
    assert first != [order(lengths).conversations(k) for k in range(20, 40)]
    assert first != [order(lengths, seed=4).conversations(k) for k in range(20)]
    still = order(lengths, shuffle=False)
    assert [still.conversations(k) for k in range(20)] == [still.conversations(k) for k in range(20, 40)]
    alone = order(lengths, shuffle=False, pack=False)
    assert [alone.conversations(k) for k in range(41)] == [[k % 40] for k in range(41)]


def test_each_window_is_packed_separately(monkeypatch):
    monkeypatch.setattr(sequence_source, "WINDOW", 4)
    rows = order([32] * 8, shuffle=False)
    assert [rows.conversations(k) for k in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
