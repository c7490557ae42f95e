"""Rank correlations of rewards; the evaluations themselves are tested with whole runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from wfm_ds.training.validation import correlation_metrics, rank_correlation
from wfm_ds.types import Score

FEW = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12)


@given(FEW)
def test_rank_correlation_is_spearmans_with_ties(pairs):
    first, second = zip(*pairs, strict=True)
    found = rank_correlation(pairs)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)


def test_rank_correlation_sees_the_order_alone():
    values = np.linspace(-1, 2, 7)
    assert rank_correlation(list(zip(values, np.exp(values), strict=True))) == pytest.approx(1)
    assert rank_correlation(list(zip(values, -np.exp(values), strict=True))) == pytest.approx(-1)
    assert rank_correlation([(1.0, 2.0)]) is None


def scores(*values):
    failure = {True: "broken", False: None}
    return [{"f": Score(sample_id="id", reward="f", value=v, failure=failure[v is None])} for v in values]


def test_prompts_of_different_difficulty_correlate_even_where_samples_of_one_do_not():
    """What a pooled correlation hides: within each prompt the two orders are opposite."""
    evaluated, rolled_out = scores(0.0, 1.0, 10.0, 11.0), scores(1.0, 0.0, 11.0, 10.0)
    metrics = correlation_metrics(evaluated, rolled_out, ["a", "a", "b", "b"])
    assert metrics["val/reward/f/rank_correlation"] == pytest.approx(0.6)
    assert metrics["val/reward/f/rank_correlation_within_prompts"] == pytest.approx(-1)
    assert metrics["val/reward/f/rollout_mean"] == 5.5


def test_samples_that_failed_on_either_side_and_prompts_without_a_difference_are_left_out():
    evaluated, rolled_out = scores(0.0, None, 1.0, 5.0, 5.0, 3.0), scores(0.0, 9.0, 2.0, 1.0, 2.0, None)
    metrics = correlation_metrics(evaluated, rolled_out, ["a", "a", "a", "b", "b", "b"])
    assert metrics["val/reward/f/rank_correlation_within_prompts"] == pytest.approx(1)
    assert metrics["val/reward/f/rollout_mean"] == 1.25
    assert correlation_metrics(scores(None), scores(1.0), ["a"]) == {}
