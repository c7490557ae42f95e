"""Stochastic solvers compared with the published formulas in float64, and the steps that add noise."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from velocities import gaussian, grid, shift_three, wavy
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.sampling import ProgressiveWindow, RandomWindow, SubsetWindow
from wfm_ds.sampling.denoise import step_noise_seeds
from wfm_ds.sampling.plan import all_trainable_steps, deterministic_plan, stochastic_plan, trainable_steps
from wfm_kernels import reference, sde_log_prob
from wfm_kernels.torch_backend import normal_noise

FP64 = torch.float64
# noise levels of diffusers' Euler scheduler with shift 3 and ten steps
SHIFT_3 = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]
LEVELS = {"flow_sde": 0.7, "dance": 0.3, "cps": 0.8}
SHAPE = (2, 3, 4, 5)


def start(shape=SHAPE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plan_of(solver, sigmas=None, **options):
    sigmas = grid(*SHIFT_3) if sigmas is None else sigmas
    return stochastic_plan(solver, sigmas, noise_level=LEVELS[solver], **options)


@check_each("form", ["published", "gaussian"])
@check_each("solver", LEVELS)
def test_stored_steps_are_the_published_steps_and_their_log_probabilities(solver, form):
    sigmas, stored = grid(*SHIFT_3), [0, 1, 5, 8]
    plan = plan_of(solver, stored_steps=stored, keep_means=True, gaussian=form == "gaussian")
    trajectory = plan.denoise(wavy, start(), [7, 8])
    assert [step.index for step in trajectory.stored_steps] == stored
    for step in trajectory.stored_steps:
        k, x = step.index, step.latents.double()
        s, after = sigmas[k].expand(2), sigmas[k + 1].expand(2)
        level = torch.full((2,), LEVELS[solver], dtype=FP64)
        velocity = wavy(step.latents, float(sigmas[k])).double()
        mean, std = reference.sde_mean_and_std(solver, x, velocity, s, after, level, SHIFT_3[1])
        torch.testing.assert_close(step.mean.double(), mean, rtol=0, atol=2e-6)
        drawn = normal_noise(step_noise_seeds([7, 8], k), math.prod(SHAPE[1:])).view(SHAPE)
        torch.testing.assert_close(step.next_latents.double(), mean + std * drawn, rtol=0, atol=2e-6)
        kind = "dance" if form == "gaussian" else solver  # name of the Gaussian form in the reference
        want = reference.sde_log_prob(kind, step.next_latents.double(), mean, std)
        torch.testing.assert_close(step.log_prob.double(), want, rtol=1e-4, atol=1e-5)


@check_each("solver", LEVELS)
def test_training_reproduces_stored_log_probs_bit_for_bit_in_any_batch(solver):
    plan = plan_of(solver, stored_steps=range(9))
    trajectory = plan.denoise(wavy, start(), [7, 8])
    for step in trajectory.stored_steps:
        velocity, row = wavy(step.latents, plan.steps[step.index].sigma), plan.table[step.index].expand(2, -1)
        assert torch.equal(sde_log_prob(velocity, step.latents, step.next_latents, row), step.log_prob)
        alone = sde_log_prob(velocity[1:], step.latents[1:], step.next_latents[1:], row[1:])
        assert torch.equal(alone, step.log_prob[1:])


@check_each("solver", LEVELS)
def test_a_stochastic_grid_starts_at_one(solver):
    almost = plan_of(solver, grid(0.9997, *SHIFT_3[1:]))
    assert almost.steps == plan_of(solver).steps
    assert torch.equal(almost.table, plan_of(solver).table)
    assert almost.steps[0].sigma == 1.0


def test_the_last_step_has_the_noise_that_the_published_samplers_give_it():
    assert {solver: 9 in plan_of(solver).noisy_steps for solver in LEVELS} == {
        "flow_sde": True,
        "dance": False,
        "cps": False,
    }
    plan = plan_of("dance")
    c_x, c_v = plan.table[9, :2].tolist()
    assert (c_x, c_v) == pytest.approx((1, -plan.steps[9].sigma))  # x0_hat


@check_each("solver", LEVELS)
def test_outside_the_window_steps_are_euler(solver):
    plan = plan_of(solver, noisy_steps=[2, 3], stored_steps=[2, 3])
    trajectory, euler = plan.denoise(wavy, start(), [7, 8]), deterministic_plan("ode", grid(*SHIFT_3))
    assert plan.noisy_steps == (2, 3)
    outside = [k for k in range(10) if k not in (2, 3)]
    assert torch.equal(plan.table[outside], euler.table[outside])
    assert torch.equal(plan.table[[2, 3]], plan_of(solver).table[[2, 3]])  # sigma_max comes from the whole grid
    x = start()
    for step in euler.steps[:2]:
        x = x + (step.sigma_next - step.sigma) * wavy(x, step.sigma)
    torch.testing.assert_close(trajectory.stored_steps[0].latents, x, rtol=0, atol=1e-6)


def test_without_noisy_steps_a_stochastic_plan_has_the_bits_of_ode():
    ode = deterministic_plan("ode", grid(*SHIFT_3)).denoise(wavy, start(), [7, 8])
    assert torch.equal(
        plan_of("flow_sde", noisy_steps=[]).denoise(wavy, start(), [7, 8]).clean_latents, ode.clean_latents
    )


@check_each("solver", LEVELS)
def test_a_sample_depends_only_on_its_seed(solver):
    noise, plan = start((3, 2, 3, 5)), plan_of(solver, stored_steps=[1, 4])
    together = plan.denoise(wavy, noise, [11, 12, 13])
    turned = plan.denoise(wavy, noise.flip(0), [13, 12, 11])
    alone = plan.denoise(wavy, noise[1:2], [12])
    other = plan.denoise(wavy, noise[1:2], [99])
    assert torch.equal(turned.clean_latents.flip(0), together.clean_latents)
    assert torch.equal(alone.clean_latents, together.clean_latents[1:2])
    for one, of_three in zip(alone.stored_steps, together.stored_steps, strict=True):
        assert torch.equal(one.next_latents, of_three.next_latents[1:2])
        assert torch.equal(one.log_prob, of_three.log_prob[1:2])
    assert not torch.equal(other.clean_latents, alone.clean_latents)


def test_noise_differs_by_step():
    assert len({int(step_noise_seeds([5], k)) for k in range(100)}) == 100


@pytest.mark.parametrize("solver", ["flow_sde", "dance"])
def test_the_stochastic_flow_of_a_gaussian_ends_at_that_gaussian(solver):
    # A correction with the wrong sign gives a final std of 9.5 (flow_sde) or 0.55 (dance).
    noise = start((2, 1, 40, 50))
    ends = plan_of(solver, shift_three(200)).denoise(gaussian(1.3, 0.4), noise, [1, 2]).clean_latents
    assert ends.mean().item() == pytest.approx(1.3, abs=0.03)
    assert ends.std().item() == pytest.approx(0.4, abs=0.02)


def test_a_noise_level_that_turns_the_sign_of_the_latents_is_refused():
    with pytest.raises(RecipeError, match=r"noise_level 1.5 is too large for flow_sde at steps \[0"):
        stochastic_plan("flow_sde", grid(*SHIFT_3), noise_level=1.5)


WINDOWS = {
    "random": RandomWindow(kind="random", size=3),
    "random, range": RandomWindow(kind="random", size=2, range=(4, 9)),
    "progressive": ProgressiveWindow(kind="progressive", size=4, iters_per_position=2),
    "subset": SubsetWindow(kind="subset", size=2, indices=[1, 3, 4, 7]),
}


@check_each("name", WINDOWS)
def test_windows_are_the_trainable_steps(name):
    window = WINDOWS[name]
    window.check_steps(10)
    seen = set()
    for step in range(1, 200):
        steps = trainable_steps(window, 10, run_seed=3, step=step)
        assert len(steps) == window.size
        assert steps == sorted(set(steps))
        seen |= set(steps)
    assert sorted(seen) == all_trainable_steps(window, 10)
    assert max(seen) <= 8


def test_without_a_window_all_steps_except_the_last_are_trained():
    assert trainable_steps(None, 10, run_seed=0, step=1) == all_trainable_steps(None, 10) == list(range(9))


def test_a_progressive_window_moves_and_starts_again():
    window = ProgressiveWindow(kind="progressive", size=4, stride=2, iters_per_position=3, range=(1, 9))
    firsts = [trainable_steps(window, 10, run_seed=0, step=step)[0] for step in range(1, 13)]
    assert firsts == [1, 1, 1, 3, 3, 3, 5, 5, 5, 2, 2, 2]  # 5 positions: after 1, 3, 5 follows 7, which wraps to 2


@check_each(
    "window",
    [
        RandomWindow(kind="random", size=3, range=(1, 9)),
        SubsetWindow(kind="subset", size=2, indices=[1, 3, 4, 7]),
    ],
)
def test_all_six_choices_are_equally_frequent(window):
    num_draws = 4000
    draws = Counter(tuple(trainable_steps(window, 10, run_seed=0, step=step)) for step in range(num_draws))
    assert len(draws) == 6
    mean = num_draws / 6
    # chi-square test, 99.9 % quantile, 5 degrees of freedom
    assert sum((n - mean) ** 2 / mean for n in draws.values()) < 20.5


@given(st.integers(2, 30), st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
@settings(deadline=None)
def test_a_random_window_must_fit_into_its_range(num_steps, size, first, last):
    window = RandomWindow(kind="random", size=size, range=(first, last))
    if last > num_steps - 1 or last - first < size:
        with pytest.raises(ValueError, match=rf"size {size} and range \[{first}, {last}\] with {num_steps} steps"):
            window.check_steps(num_steps)
    else:
        window.check_steps(num_steps)
        assert set(trainable_steps(window, num_steps, run_seed=0, step=1)) <= set(range(first, last))


@check_each(
    ("window", "message"),
    [
        ({"size": 2, "indices": [1, 9]}, r"must be at most 8 with sampling\.steps 10"),
        ({"size": 3, "indices": [1, 2]}, "size 3 needs at least 3 different indices"),
        ({"size": 1, "indices": [1, 1]}, "different indices"),
    ],
)
def test_subsets_with_the_last_step_or_too_few_indices_are_refused(window, message):
    with pytest.raises(ValueError, match=message):
        SubsetWindow(kind="subset", **window).check_steps(10)
