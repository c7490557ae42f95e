import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from velocities import grid
from wfm_ds.sampling.plan import apply_shift, invert_shift, solver_steps


@given(st.floats(1e-6, 1 - 1e-6), st.floats(0.2, 12))
def test_shift_adds_its_logarithm_to_the_logit_and_can_be_undone(q, shift):
    sigma = apply_shift(grid(q), shift)
    assert torch.logit(sigma).item() == pytest.approx(math.log(q / (1 - q)) + math.log(shift), abs=1e-7)
    assert invert_shift(sigma, shift).item() == pytest.approx(q, rel=1e-9)


def test_shift_keeps_the_ends():
    assert apply_shift(grid(0.0, 1.0), 3.0).tolist() == [0.0, 1.0]
    assert invert_shift(grid(0.0, 1.0), 3.0).tolist() == [0.0, 1.0]


def test_euler_steps_follow_the_grid():
    steps = solver_steps("ode", grid(1.0, 0.75, 0.5, 0.0))
    assert [(s.sigma, s.sigma_next, s.correction) for s in steps] == [(1.0, 0.75, 0), (0.75, 0.5, 0), (0.5, 0.0, 0)]


def test_dpm2_is_first_order_where_the_step_before_or_the_step_itself_has_no_finite_log_snr():
    from_one = solver_steps("dpm2", grid(1.0, 0.9, 0.7, 0.4, 0.1, 0.0))
    assert [s.correction != 0 for s in from_one] == [False, False, True, True, False]
    below_one = solver_steps("dpm2", grid(0.99, 0.9, 0.7, 0.4, 0.1, 0.0))
    assert [s.correction != 0 for s in below_one] == [False, True, True, True, False]


def test_dpm2_is_first_order_in_a_step_of_more_than_twice_the_length_of_the_one_before():
    def logistic(*half_log_snrs):
        return [1 / (1 + math.exp(value)) for value in half_log_snrs]

    steps = solver_steps("dpm2", grid(*logistic(-3, -1, 2.9, 3.9, 6.0, 7.0), 0.0))  # lengths 2, 3.9, 1, 2.1, 1
    assert [s.correction != 0 for s in steps] == [False, True, True, False, True, False]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_dpm2_with_one_or_two_steps_is_euler(num_steps):
    sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    assert solver_steps("dpm2", sigmas) == solver_steps("ode", sigmas)


def test_dpm2_weights_are_the_published_ones():
    before, now, after = 0.8, 0.5, 0.3
    lam = {s: math.log((1 - s) / s) for s in (before, now, after)}
    h, h_before = lam[after] - lam[now], lam[now] - lam[before]
    published = (1 - after / now) * h / (2 * h_before)
    step = solver_steps("dpm2", grid(1.0, before, now, after, 0.0))[2]
    assert step.correction == pytest.approx(published, rel=1e-14)

    # x' = (s'/s)*x + (1 - s'/s)*(m + h/(2*h0)*(m - m_before)), with m = x - s*v
    x, v, m_before = 1.7, -0.4, 0.9
    m = x - now * v
    theirs = after / now * x + (1 - after / now) * (m + h / (2 * h_before) * (m - m_before))
    assert x + (after - now) * v + step.correction * (m - m_before) == pytest.approx(theirs, rel=1e-14)


@check_each(
    ("sigmas", "message"),
    [
        (grid(1.0, 0.5, 0.5, 0.0), "decrease strictly"),
        (grid(0.5, 1.0, 0.0), "decrease strictly"),
        (grid(1.0, 0.5), "to 0"),
        (grid(1.5, 0.5, 0.0), "at most 1"),
        (grid(1.0, float("nan"), 0.0), "decrease strictly"),
        (grid(0.0), r"\[N\+1\]"),
        (grid(1.0, 0.0).float(), "float64"),
        (grid(1.0, 0.0)[None], r"\[N\+1\]"),
        (grid(1.0, 0.0).to("meta"), "on the CPU"),
    ],
)
def test_other_grids_are_refused(sigmas, message):
    with pytest.raises(ValueError, match=message):
        solver_steps("ode", sigmas)


def test_an_unknown_solver_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown solver 'heun': use ode or dpm2"):
        solver_steps("heun", grid(1.0, 0.5, 0.0))
