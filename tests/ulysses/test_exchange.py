"""Sizes of the ranks' shards. tests/multi_rank/test_exchange.py tests the exchanges."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from wfm_ds.errors import UserError
from wfm_ds.ulysses.exchange import shard_sizes


@given(st.integers(1, 64), st.integers(0, 1000))
def test_shards_cover_everything_and_differ_by_at_most_one(num_ranks, extra):
    lengths = shard_sizes(num_ranks + extra, num_ranks, "tokens")
    assert sum(lengths) == num_ranks + extra
    assert len(lengths) == num_ranks
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_more_ranks_than_items_is_an_error_with_the_limit():
    message = r"engine\.sequence_parallel = 4 exceeds the number of latent frames, 3; set it to 3 or less"
    with pytest.raises(UserError, match=message):
        shard_sizes(3, 4, "latent frames")
