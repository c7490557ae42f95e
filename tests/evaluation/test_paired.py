"""Statistics of paired evaluation: coverage of the confidence intervals, and the effect of pairing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from wfm_ds.evaluation.paired_statistics import adjust_holm, compare_scores, estimate_mean, estimate_ratio, ratio_bounds

NAN = math.nan


def drawn(rng, prompts, seeds, effect):
    """Return scores [P, S] of the base and of another model. Prompts differ in difficulty and in the gain of the other
    model; a seed has the same effect on both models."""
    worth = rng.normal(size=(prompts, 1)) + rng.normal(size=(prompts, seeds))
    gain = effect + 0.6 * rng.normal(size=(prompts, 1))
    base, other = (worth + 0.5 * rng.normal(size=(prompts, seeds)) for _ in range(2))
    return base, other + gain


def test_the_interval_over_prompts_has_its_coverage_and_one_over_images_does_not():
    rng, runs, effect = np.random.default_rng(0), 2000, 0.3
    covered = naive = 0
    for _ in range(runs):
        base, other = drawn(rng, 8, 4, effect)
        found = compare_scores(base, other).estimate
        covered += found.low <= effect <= found.high
        gaps = (other - base).ravel()
        naive += abs(gaps.mean() - effect) <= 1.96 * gaps.std(ddof=1) / math.sqrt(len(gaps))
    assert 0.935 <= covered / runs <= 0.965  # within three standard errors for 2000 runs
    assert naive / runs < 0.88


def test_it_is_the_t_test_of_scipy_on_prompt_means():
    base, other = drawn(np.random.default_rng(2), 12, 3, 0.2)
    found = compare_scores(base, other)
    want = stats.ttest_rel(other.mean(axis=1), base.mean(axis=1))
    low, high = want.confidence_interval(0.95)
    assert (found.estimate.low, found.estimate.high) == pytest.approx((low, high))
    less = stats.ttest_rel(other.mean(axis=1), base.mean(axis=1), alternative="less")
    assert found.p_decrease == pytest.approx(less.pvalue)
    assert found.z == pytest.approx((other - base).mean() / base.std(ddof=1))


@given(st.integers(0, 2**32 - 1))
def test_effects_shared_by_both_models_cancel(seed):
    rng = np.random.default_rng(seed)
    base, other = drawn(rng, 6, 3, 0.5)
    worth = 100 * rng.normal(size=base.shape)
    plain, shifted = compare_scores(base, other), compare_scores(base + worth, other + worth)
    assert shifted.estimate.value == pytest.approx(plain.estimate.value)
    assert shifted.estimate.half_width == pytest.approx(plain.estimate.half_width)
    assert compare_scores(base, base).estimate.value == compare_scores(base, base).estimate.half_width == 0


def test_a_pair_without_both_scores_is_left_out_and_counted():
    base = np.array([[1.0, 2.0], [NAN, 4.0], [5.0, NAN], [1.0, 1.0], [0.0, 0.0], [3.0, 3.0]])
    other = np.array([[2.0, 4.0], [9.0, 4.5], [NAN, 6.0], [1.0, 1.0], [1.0, 1.0], [3.0, NAN]])
    found = compare_scores(base, other)
    assert (found.estimate.num_prompts, found.estimate.num_samples, found.num_missing, found.num_better) == (5, 8, 4, 5)
    assert found.estimate.value == pytest.approx((1.5 + 0.5 + 0 + 1 + 0) / 5)
    assert compare_scores(base, np.full_like(base, NAN)) is None
    assert estimate_mean(np.full((3, 2), NAN)) is None


def test_four_prompts_have_no_interval():
    found = compare_scores(np.zeros((4, 2)), np.ones((4, 2)))
    assert found.estimate.half_width is None
    assert not found.estimate.is_above_zero
    assert math.isnan(found.p_decrease)


def test_equal_gaps_are_certain():
    assert compare_scores(np.zeros((5, 1)), -np.ones((5, 1))).p_decrease == 0
    assert compare_scores(np.zeros((5, 1)), np.ones((5, 1))).p_decrease == 1
    assert compare_scores(np.zeros((5, 1)), -np.ones((5, 1))).z == -math.inf


def test_holm_correction_equals_the_published_procedure():
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.5, NAN, 0.9])[::2] == pytest.approx([1.0, 1.0])
    assert math.isnan(adjust_holm([0.5, NAN])[1])


def test_a_ratio_and_its_inverse_have_inverse_bounds():
    rng = np.random.default_rng(3)
    base, other = np.exp(rng.normal(size=9)), np.exp(rng.normal(size=9) - 0.3)
    one, back = estimate_ratio(base, other), estimate_ratio(other, base)
    low, high = ratio_bounds(one)
    assert one.value * back.value == pytest.approx(1)
    assert ratio_bounds(back) == pytest.approx((1 / high, 1 / low))
    assert estimate_ratio(np.array([0.0, NAN]), np.array([1.0, 1.0])) is None
