import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_kernels import reference, sde_coefficients

pytestmark = pytest.mark.unit

FP64 = torch.float64
# noise levels of diffusers' Euler scheduler with shift 3 and ten steps
GRID = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]


def grid(*values):
    return torch.tensor(values, dtype=FP64)


def table(kind, values, eta, sigma_max=None):
    return sde_coefficients(kind, grid(*values[:-1]), grid(*values[1:]), eta=eta, sigma_max=sigma_max)


def literal(kind, values, eta, sigma_max):
    """Return columns c_x, c_v and std of the published step: its values at (x, v) = (1, 0) and (0, 1)."""
    sigma, after = grid(*values[:-1]), grid(*values[1:])
    levels, one, zero = torch.full_like(sigma, eta), torch.ones(len(sigma), 1, dtype=FP64), None
    zero = torch.zeros_like(one)
    c_x, std = reference.sde_mean_and_std(kind, one, zero, sigma, after, levels, sigma_max)
    c_v, _ = reference.sde_mean_and_std(kind, zero, one, sigma, after, levels, sigma_max)
    return torch.cat([c_x, c_v, std], dim=1)


@check_each(("kind", "eta", "steps"), [("flow_sde", 0.7, 10), ("dance", 0.3, 10), ("cps", 0.8, 10)])
def test_columns_are_the_published_formulas(kind, eta, steps):
    values = GRID[: steps + 1]
    rows = table(kind, values, eta, GRID[1])
    assert rows.dtype == FP64
    want = literal(kind, values, eta, GRID[1])
    torch.testing.assert_close(rows[:, :3], want, rtol=0, atol=1e-12)


@check_each(("kind", "eta"), [("flow_sde", 0.7), ("dance", 0.3), ("cps", 0.8), ("ode", 0.0)])
def test_log_prob_columns_are_those_of_the_published_form(kind, eta):
    rows = table(kind, GRID, eta, GRID[1])
    sigma, after = grid(*GRID[:-1]), grid(*GRID[1:])
    x, v, z = (torch.randn((10, 3, 5), generator=torch.Generator().manual_seed(i), dtype=FP64) for i in range(3))
    mean, std = reference.sde_mean_and_std(kind, x, v, sigma, after, torch.full_like(sigma, eta), GRID[1])
    x_next = mean + std * z
    want = reference.sde_log_prob(kind, x_next, mean, std)
    got = rows[:, 4] - rows[:, 3] * reference.sample_mean((x_next - mean) ** 2)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_known_values_of_flow_sde_and_cps():
    std = table("flow_sde", GRID, 0.7, GRID[1])[:, 2].tolist()
    assert std == pytest.approx(
        [0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254, 0.0063], abs=6e-5
    )
    assert table("cps", GRID, 0.8)[5, 2].item() == pytest.approx(0.572679, abs=1e-6)


@check_each("kind", ["flow_sde", "dance", "cps"])
def test_no_noise_is_the_ode(kind):
    torch.testing.assert_close(table(kind, GRID, 0.0, 0.9), table("ode", GRID, 0.0), rtol=0, atol=1e-15)


def test_the_ode_is_euler():
    assert table("ode", [1.0, 0.75, 0.5], 0.7).tolist() == [[1, -0.25, 0, 0, 0], [1, -0.25, 0, 0, 0]]


def test_rows_without_noise_carry_no_log_prob_and_others_do():
    """eta differs by row: a window of stochastic steps inside an ODE."""
    window = grid(0.0, 0.7, 0.7, *[0.0] * 7)
    rows = sde_coefficients("flow_sde", grid(*GRID[:-1]), grid(*GRID[1:]), eta=window, sigma_max=GRID[1])
    assert (rows[:, 2] > 0).tolist() == [level > 0 for level in window.tolist()]
    assert rows[window == 0][:, 2:].abs().max() == 0
    assert (rows[window > 0][:, 3] > 0).all()
    last = table("cps", GRID, 0.8)[-1]
    assert last[2:].tolist() == [0, 0, 0]
    assert table("dance", [0.5, 0.5], 0.3)[0, 2:].tolist() == [0, 0, 0]  # both levels are equal


@pytest.mark.parametrize("start", [1.0, 0.9997])
def test_a_schedule_that_starts_at_or_just_below_one_has_the_published_first_step(start):
    row = table("flow_sde", [start, *GRID[1:]], 0.7, GRID[1])[0]
    assert row[2].item() == pytest.approx(0.7, rel=5e-3)
    k = 0.7**2 / (2 * (1 - GRID[1]))
    # uses the unclamped sigma
    assert row[1].item() == pytest.approx((1 + k * (1 - start)) * (GRID[1] - start), rel=1e-12)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1))
def test_cps_keeps_the_noise_level(sigma, share, eta):
    """For x = (1-s) x0 + s eps and the exact velocity, the noise of the next latents has variance s'^2."""
    after = sigma * share
    c_x, c_v, std, *_ = sde_coefficients("cps", grid(sigma), grid(after), eta=eta)[0].tolist()
    of_clean, of_noise = c_x * (1 - sigma) - c_v, c_x * sigma + c_v
    assert of_clean == pytest.approx(1 - after, abs=1e-12)
    assert math.hypot(of_noise, std) == pytest.approx(after, abs=1e-12)


@check_each(
    ("arguments", "message"),
    [
        (("heun", grid(0.5), grid(0.4)), "unknown kind of step 'heun'; choose one of flow_sde, dance, cps, ode"),
        (("ode", grid(0.5, 0.4), grid(0.4)), r"both be \[B\]"),
        (("ode", grid(0.5)[None], grid(0.4)[None]), r"both be \[B\]"),
        (("ode", grid(0.4), grid(0.5)), "expected 1 >= sigma >= sigma_next >= 0"),
        (("ode", grid(1.5), grid(0.5)), "expected 1 >= sigma >= sigma_next >= 0"),
        (("ode", grid(0.5), grid(-0.1)), "expected 1 >= sigma >= sigma_next >= 0"),
        (("ode", grid(float("nan")), grid(0.1)), "expected 1 >= sigma >= sigma_next >= 0"),
        (("ode", torch.tensor([1]), torch.tensor([0])), "floating point"),
        (("dance", grid(0.0), grid(0.0)), "sigma above 0"),
        (("flow_sde", grid(1.0), grid(0.9)), "needs a sigma_max below 1"),
    ],
)
def test_other_steps_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sde_coefficients(*arguments, eta=0.5)


@check_each(
    ("eta", "message"),
    [(-0.1, "at least 0"), (float("inf"), "finite"), (1.5, "at most 1"), (torch.ones(3), r"a number or \[1\]")],
)
def test_other_noise_levels_are_refused(eta, message):
    with pytest.raises(ValueError, match=message):
        sde_coefficients("cps", grid(0.5), grid(0.4), eta=eta)
