import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from velocities import gaussian, wavy
from wfm_ds.models.conditioning_frames import add_clean_frames, get_clean_frames
from wfm_ds.sampling.denoise import step_noise_seeds
from wfm_ds.sampling.edm import INITIAL_CHURN, Churn, EdmStep, karras_levels, make_edm_plan
from wfm_ds.sampling.latents import draw_device_normal

FP64 = torch.float64
HIGHEST = 200.0


def churn(num_steps, s_churn=1.0, s_t_min=0.0, s_t_max=math.inf, s_noise=1.0):
    return Churn.from_settings(num_steps, s_churn=s_churn, s_t_min=s_t_min, s_t_max=s_t_max, s_noise=s_noise)


def plan(num_steps, solver="edm_2ab", stored=(), **keys):
    return make_edm_plan(solver, num_steps, churn(num_steps, **keys), stored_steps=stored)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def test_levels_and_churn_are_the_published_ones():
    levels = karras_levels(20)
    assert len(levels) == 21
    assert levels[:4] == pytest.approx([200, 152.660, 115.269, 86.0198], rel=1e-5)
    assert levels[-2:] == pytest.approx([0.02755, 0.01], rel=1e-3)
    assert all(high > low for high, low in itertools.pairwise(levels))
    assert churn(20).relative == pytest.approx(1 / 21)
    assert churn(10).relative == pytest.approx(1 / 11)
    assert churn(5).relative == pytest.approx(math.sqrt(1.2) - 1)  # smaller than 1/6


@pytest.mark.parametrize(("num_steps", "share"), [(20, 0.312259), (10, 0.435985)])
def test_the_noise_of_a_step_is_the_churn_of_the_next_level(num_steps, share):
    levels = karras_levels(num_steps)
    stds = [step.std for step in plan(num_steps).steps]
    assert stds[:-1] == pytest.approx([share * level for level in levels[1:-1]], rel=2e-6)
    assert stds[-1] == 0


def res_step(x, clean, clean_before, level_before, level, level_after):
    """Two-step rule in ln S in the notation of the solver's authors, with phi functions and a node c2 in the past."""
    h = math.log(level / level_after)
    c2 = -math.log(level_before / level) / h
    phi1, phi2 = (1 - math.exp(-h)) / h, (math.exp(-h) - 1 + h) / h**2
    return math.exp(-h) * x + h * ((phi1 - phi2 / c2) * clean + phi2 / c2 * clean_before)


@check_each("num_steps", [3, 10, 20])
def test_steps_of_2ab_equal_the_residual_form(num_steps):
    steps, levels = plan(num_steps).steps, karras_levels(num_steps)
    x, clean, clean_before = normal(3, 50)
    for k in range(1, num_steps):
        step = steps[k]
        want = res_step(x, clean, clean_before, steps[k - 1].level, step.level, levels[k + 1])
        torch.testing.assert_close(
            step.state_coef * x + step.clean_coef * clean + step.previous_clean_coef * clean_before, want
        )
    assert steps[0].previous_clean_coef == 0
    assert steps[0].clean_coef == pytest.approx(1 - levels[1] / steps[0].level)


@pytest.mark.parametrize("solver", ["edm_2ab", "edm_euler"])
@given(st.integers(1, 60), st.floats(0, 3))
def test_every_step_preserves_a_constant_x0_prediction(solver, num_steps, s_churn):
    for step in plan(num_steps, solver, s_churn=s_churn).steps:
        assert step.state_coef + step.clean_coef + step.previous_clean_coef == pytest.approx(1)
        assert 0 < step.state_coef < 1


def test_euler_without_churn_is_the_flows_euler_at_the_same_levels():
    levels, xi = karras_levels(12), normal(2, 3, 4, 5)
    sigmas = [level / (1 + level) for level in levels]
    x = HIGHEST * xi / (1 + HIGHEST)
    for s, after in itertools.pairwise(sigmas):
        x = x + (after - s) * wavy(x, s)
    want = x - sigmas[-1] * wavy(x, sigmas[-1])
    got = plan(12, "edm_euler", s_churn=0).denoise(wavy, xi, [1, 2])
    torch.testing.assert_close(got.clean_latents, want, rtol=1e-10, atol=1e-10)


def step_noise(seeds, step, like):
    return draw_device_normal(step_noise_seeds(seeds, step), like)


def test_every_stored_state_is_the_step_before_it_plus_its_noise():
    num_steps, seeds, xi = 6, [3, 4], normal(2, 3, 4, 5)
    whole = plan(num_steps, stored=range(num_steps))
    states = whole.denoise(wavy, xi, seeds).states
    assert sorted(states) == list(range(num_steps))
    start = HIGHEST * xi + whole.start_std * step_noise(seeds, INITIAL_CHURN, xi)
    torch.testing.assert_close(states[0] * (1 + whole.steps[0].level), start)
    clean_before = torch.zeros_like(xi)
    for k, step in enumerate(whole.steps[:-1]):
        clean = states[k] - step.sigma * wavy(states[k], step.sigma)
        mean = (
            step.state_coef * states[k] * (1 + step.level)
            + step.clean_coef * clean
            + step.previous_clean_coef * clean_before
        )
        after = states[k + 1] * (1 + whole.steps[k + 1].level)
        torch.testing.assert_close(after, mean + step.std * step_noise(seeds, k, xi))
        clean_before = clean


def test_gain_is_the_derivative_of_the_mean_in_units_of_its_noise():
    step = plan(20).steps[10]
    x, velocity = normal(2, 30), torch.zeros((), dtype=FP64, requires_grad=True)
    mean = (
        step.state_coef * x[0]
        + step.clean_coef * (x[0] / (1 + step.level) - step.sigma * velocity)
        + step.previous_clean_coef * x[1]
    )
    slope = torch.autograd.grad(mean[0], velocity)[0]
    assert step.gain == pytest.approx(slope.item() / step.std)
    gains = [abs(plan(20).steps[k].gain) for k in (0, 10, 18)]
    assert gains == pytest.approx([0.0057, 0.386, 7.75], rel=0.02)
    literal = [2 * plan(20).steps[k].std ** 2 * gain for k, gain in zip((0, 10, 18), gains, strict=True)]
    assert literal == pytest.approx([25.7, 1.60, 0.0011], rel=0.05)


@check_each(
    ("keys", "want"),
    [({}, [0, 1, 2, 3, 4]), ({"s_churn": 0}, []), ({"s_t_max": 30.0}, [1, 2, 3, 4]), ({"s_t_min": 1.0}, [0, 1, 2, 3])],
)
def test_trainable_steps_precede_churn(keys, want):
    levels = karras_levels(6)
    assert levels[1] > 30 > levels[2]
    assert levels[4] > 1 > levels[5]
    assert plan(6, **keys).trainable_steps() == want


@pytest.mark.parametrize(("solver", "num_steps"), [("edm_2ab", 60), ("edm_euler", 200)])
def test_churn_preserves_the_data_distribution(solver, num_steps):
    clean = plan(num_steps, solver).denoise(gaussian(1.3, 0.4), normal(1, 1, 200, 200).float(), [5]).clean_latents
    assert clean.dtype == torch.float32
    assert clean.mean().item() == pytest.approx(1.3, abs=0.02)
    assert clean.std().item() == pytest.approx(0.4, rel=0.03)


def test_a_sample_depends_only_on_its_noise_and_seed():
    xi = normal(3, 2, 4, 5).float()
    whole = plan(5, stored=(1, 3)).denoise(wavy, xi, [7, 8, 9])
    alone = plan(5, stored=(1, 3)).denoise(wavy, xi[1:2], [8])
    assert torch.equal(whole.clean_latents[1:2], alone.clean_latents)
    assert torch.equal(whole.states[3][1:2], alone.states[3])
    assert not torch.equal(plan(5).denoise(wavy, xi[1:2], [9]).clean_latents, alone.clean_latents)
    assert sorted(whole.states) == [1, 3]


def test_conditioning_frames_do_not_change_and_their_noise_has_no_effect():
    video, xi = normal(2, 2, 3, 4, 4, seed=1).float(), normal(2, 2, 3, 4, 4).float()
    conditioning = get_clean_frames(add_clean_frames({}, video, torch.tensor([1, 2])))

    def predict(x, sigma):
        sigma_B = torch.full((2,), sigma)
        entered = conditioning.insert_clean_latents(x)
        return conditioning.insert_known_velocity(wavy(entered, sigma) + entered.mean(dim=2, keepdim=True), x, sigma_B)

    clean = plan(6).denoise(predict, xi, [1, 2]).clean_latents
    mask = conditioning.mask.expand_as(clean).bool()
    torch.testing.assert_close(clean[mask], video[mask], rtol=0, atol=1e-6)
    other = plan(6).denoise(predict, torch.where(mask, -xi, xi), [1, 2]).clean_latents
    assert torch.equal(other[~mask], clean[~mask])


@check_each(
    ("solver", "num_steps", "keys", "message"),
    [
        ("edm_heun", 5, {}, "EDM solver 'edm_heun' with 5 steps: use edm_2ab or edm_euler"),
        ("edm_2ab", 0, {}, "with 0 steps"),
        ("edm_2ab", 300, {"s_churn": 30.0, "s_t_max": 20.0}, "do not decrease"),
    ],
)
def test_invalid_plans_are_refused(solver, num_steps, keys, message):
    with pytest.raises(ValueError, match=message):
        plan(num_steps, solver, **keys)


def test_a_step_without_noise_has_no_finite_gain():
    assert EdmStep(level=1.0, state_coef=0.5, clean_coef=0.5, std=0.0).gain == -math.inf
