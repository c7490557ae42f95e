from hypothesis import given
from hypothesis import strategies as st

from wfm_ds.chunks import even_ranges


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_shares_contain_each_item_once_and_differ_by_at_most_one(count, parts):
    shares = even_ranges(count, parts)
    assert [i for share in shares for i in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
