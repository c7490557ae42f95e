"""Who gets how much; the exchanges themselves need ranks (distributed/test_exchange.py)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from wfm_ds.errors import UserError
from wfm_ds.ulysses.exchange import shard_sizes


@given(st.integers(1, 64), st.integers(0, 1000))
def test_shares_are_all_of_it_and_differ_by_one_at_most(num_ranks, extra):
    lengths = shard_sizes(num_ranks + extra, num_ranks, "tokens")
    assert sum(lengths) == num_ranks + extra
    assert len(lengths) == num_ranks
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_a_rank_without_a_share_is_an_error_that_says_what_fits():
    message = r"engine\.sequence_parallel = 4 exceeds the number of latent frames, 3; set it to 3 or less"
    with pytest.raises(UserError, match=message):
        shard_sizes(3, 4, "latent frames")
