"""The schedules of the engine, as functions of the update alone. What needs ranks is in tests/multi_rank/."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wfm_ds.engine.optimizer import ema_decay, learning_rate
from wfm_ds.recipe.sections import OptimizerRecipe

SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


def rates(total, **keys):
    return [learning_rate(OptimizerRecipe(**keys), update, total) for update in range(1, total + 1)]


@given(schedule=SCHEDULES, total=st.integers(1, 60), warmup=st.integers(0, 80), final=st.floats(0, 1))
def test_rates_rise_to_the_peak_and_fall_to_the_final_share(schedule, total, warmup, final):
    got = rates(total, lr=0.5, schedule=schedule, warmup_steps=warmup, final_lr_fraction=final)
    peak = max(warmup, 1)
    rising, falling = got[:peak], got[peak - 1 :]
    assert rising == pytest.approx([0.5 * update / peak for update in range(1, len(rising) + 1)])
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    if total > peak:
        assert got[-1] == pytest.approx(0.5 if schedule == "constant" else 0.5 * final)


def test_cosine_and_linear_are_half_way_in_the_middle():
    for schedule in ("linear", "cosine"):
        assert rates(9, lr=1.0, schedule=schedule, final_lr_fraction=0.2)[4] == pytest.approx(0.6)
    quarter = rates(9, lr=1.0, schedule="cosine")[2]
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_updates_past_the_plan_keep_the_final_rate():
    options = OptimizerRecipe(lr=1.0, schedule="linear", final_lr_fraction=0.1)
    assert learning_rate(options, 30, 20) == pytest.approx(0.1)


def test_ema_decay_grows_to_its_bound():
    assert [ema_decay(0.9, j) for j in (1, 2, 1000)] == pytest.approx([2 / 11, 3 / 12, 0.9])
    assert ema_decay(0.9999, 1000) == pytest.approx(1001 / 1010)
