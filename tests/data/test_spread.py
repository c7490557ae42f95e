"""Prompts drawn in proportion to their reward std: exact frequencies, and the stored statistics."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.data.prompt_weights import UNIT, RewardStdTable, draw_prompts, systematic_sample

FLOORS = st.floats(2**-15, 1.0)
VARIANCES = st.lists(st.one_of(st.none(), st.just(0.0), st.floats(1e-12, 1e6)), min_size=1, max_size=40)


def table_of(variances, floor=0.14, memory=0.6):
    """Return a table with one observation of each prompt; None means no observation."""
    table = RewardStdTable(len(variances), floor=floor, memory=memory)
    for prompt, variance in enumerate(variances):
        if variance is not None:
            table.update(prompt, [variance])
    return table


@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=9), count=st.integers(1, 20))
def test_over_all_starts_each_prompt_comes_exactly_by_its_weight(weights, count):
    total = sum(weights)
    counts = np.array(
        [
            np.bincount(systematic_sample(np.array(weights), count, start), minlength=len(weights))
            for start in range(total)
        ]
    )
    assert counts.sum(axis=0).tolist() == [count * weight for weight in weights]  # out of `total` draws
    assert (counts.sum(axis=1) == count).all()
    for of_prompt, weight in zip(counts.T, weights, strict=True):
        share = Fraction(count * weight, total)
        assert {math.floor(share), math.ceil(share)} >= set(of_prompt.tolist())


@given(variances=VARIANCES, floor=FLOORS)
def test_no_share_is_below_the_floor(variances, floor):
    weights = table_of(variances, floor).weights()
    spreads = [math.sqrt(v) for v in variances if v is not None]
    # The largest weight is 1: floor / (n (max + floor)) for weights of the form std / max + floor / (1 - floor).
    assert int(weights.min()) * len(weights) >= Fraction(floor) * int(weights.sum())
    assert int(weights.max()) <= UNIT
    if any(spreads):
        assert weights[variances.index(max(v for v in variances if v is not None))] == UNIT


@given(variances=VARIANCES)
def test_shares_are_those_of_the_formula(variances):
    known = [math.sqrt(v) for v in variances if v is not None]
    largest, mean = (max(known), math.fsum(known) / len(known)) if any(known) else (1.0, 1.0)
    spreads = [mean if v is None or not any(known) else math.sqrt(v) for v in variances]
    want = [0.14 + 0.86 * spread / largest for spread in spreads]
    assert table_of(variances).weights() / UNIT == pytest.approx(want, abs=2 / UNIT)


@check_each("variance", [0.0, 0.25, 3e5])
def test_equal_spreads_are_drawn_evenly(variance):
    table = table_of([variance] * 10)
    assert set(table.weights().tolist()) == {UNIT}
    assert all(sorted(draw_prompts(table.weights(), 10, seed=3, step=step)) == list(range(10)) for step in range(1, 30))
    assert table.stats()["data/prompts_effective"] == 10


def test_nothing_known_is_drawn_evenly_and_a_new_prompt_like_the_mean_of_the_others():
    assert set(RewardStdTable(7, floor=0.14, memory=0.6).weights().tolist()) == {UNIT}
    weights = table_of([0.25, 0.04, 0.0, None, None]).weights()
    assert weights[3] == weights[4] == pytest.approx(weights[:3].mean(), abs=1)


@given(groups=st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_variance_is_the_running_mean_whatever_the_order_of_a_steps_groups(groups):
    table, other = RewardStdTable(1, floor=0.1, memory=0.6), RewardStdTable(1, floor=0.1, memory=0.6)
    want = None
    for of_step in groups:
        table.update(0, of_step)
        other.update(0, of_step[::-1])
        kept = 0.0 if want is None else 0.6 ** len(of_step)
        want = kept * (want or 0.0) + (1 - kept) * sum(of_step) / len(of_step)
    assert table.variances[0] == other.variances[0]
    assert table.variances[0] == pytest.approx(want, rel=1e-12)


def test_rewards_that_differ_by_rounding_errors_draw_the_same_prompts():
    """Rounding differs if the number of ranks changes the micro-batches."""
    variances = np.random.default_rng(0).random(40)
    moved = variances * (1 + 1e-6 * np.random.default_rng(1).standard_normal(40))
    one, other = table_of(variances).weights(), table_of(moved).weights()
    steps = range(500)
    same = sum(draw_prompts(one, 8, seed=2, step=step) == draw_prompts(other, 8, seed=2, step=step) for step in steps)
    assert not np.array_equal(one, other)
    assert same >= 498


def test_a_draw_follows_from_seed_and_step():
    weights = table_of([0.1, 0.2, 0.0, 0.25, None, 0.05, 0.0, 0.01]).weights()
    draws = [draw_prompts(weights, 3, seed=seed, step=step) for seed in (0, 1) for step in range(4)]
    assert draws == [draw_prompts(weights, 3, seed=seed, step=step) for seed in (0, 1) for step in range(4)]
    assert draws[:4] != draws[4:]
    # A resumed run must draw the same prompts with other versions of numpy or of this code.
    assert draws[:4] == [[7, 5, 4], [0, 3, 1], [3, 1, 0], [4, 5, 0]]
    alone = table_of([0.25] + [0.0] * 9).weights()  # expected draws of the first prompt: 10 / (1 + 9 * .14) = 4.42
    assert {draw_prompts(alone, 10, seed=1, step=step).count(0) for step in range(50)} == {4, 5}


def test_the_state_has_what_was_seen_bit_by_bit_and_is_small():
    table = RewardStdTable(50_000, floor=0.14, memory=0.6)
    for prompt in range(0, 50_000, 100):
        table.update(prompt, [prompt / 7, 0.1])
    assert len(json.dumps(table.state())) < 9_000  # 500 prompts
    other = RewardStdTable(50_000, floor=0.14, memory=0.6)
    other.update(1, [1.0])
    other.restore(json.loads(json.dumps(table.state())))
    assert other.variances.tobytes() == table.variances.tobytes()
    full = RewardStdTable(50_000, floor=0.14, memory=0.6)
    full.variances[:] = np.random.default_rng(0).random(50_000)
    assert len(json.dumps(full.state())) < 900_000


def test_metrics_say_how_many_prompts_are_known_and_how_differently_they_are_drawn():
    assert RewardStdTable(3, floor=0.5, memory=0.6).stats() == {"data/prompts_seen": 0, "data/prompts_effective": 3}
    stats = table_of([0.25, 0.0, None], floor=0.5).stats()  # weights 1, 1/2 and 3/4
    assert stats == pytest.approx(
        {"data/prompts_seen": 2, "data/prompts_effective": 2.25**2 / 1.8125, "data/prompt_reward_std_mean": 0.25},
        rel=1e-5,
    )
