import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.algorithms.dpo import Dpo, implicit_rewards, preference_loss
from wfm_ds.algorithms.supervised import velocity_errors
from wfm_ds.recipe.algorithms import DpoAlgorithm

SHAPE = (2, 3, 4, 5, 6)  # chosen and rejected samples of three pairs


def dpo(beta=2000.0):
    return Dpo(DpoAlgorithm(name="dpo", beta=beta))


def case(seed, dtype=torch.float32):
    """Return velocities of the policy and of a nearby reference, clean latents, and noise shared within each pair."""
    draw = torch.Generator().manual_seed(seed)
    velocity, clean = (torch.randn(SHAPE, generator=draw, dtype=torch.float64) for _ in range(2))
    ref = velocity + 0.02 * torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    noise = torch.randn(SHAPE[1:], generator=draw, dtype=torch.float64).expand(SHAPE)
    return [tensor.to(dtype) for tensor in (velocity, ref, clean, noise)]


def errors_of(velocity, clean, noise):
    rows = (tensor.flatten(0, 1) for tensor in (velocity, clean, noise))
    return velocity_errors(*rows).view(SHAPE[:2])


def loss_and_gradient(algorithm, velocity, ref, clean, noise):
    velocity = velocity.clone().requires_grad_()
    refs = {"ref": errors_of(ref, clean, noise)}
    loss_B, stats = algorithm.loss(errors_of(velocity, clean, noise), torch.rand(SHAPE[1]), refs)
    (gradient,) = torch.autograd.grad(loss_B.sum(), velocity)
    return loss_B.detach(), gradient, stats


@pytest.mark.parametrize("beta", [1.0, 2000.0])
def test_loss_and_gradient_equal_float64(beta):
    loss_B, gradient, stats = loss_and_gradient(dpo(beta), *case(0))
    velocity, ref, clean, noise = case(0, torch.float64)
    size = math.prod(SHAPE[2:])
    square = [(v - (noise - clean)).square().flatten(2).sum(2) / size for v in (velocity, ref)]
    reward = -beta / 2 * (square[0] - square[1])
    margin_B = reward[0] - reward[1]
    want = torch.log1p(torch.exp(-margin_B))
    # d loss / d v = -sigmoid(-margin) * d margin / d v, where d l / d v = 2 (v - u) / n
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1, 1, 1)
    pull_B = torch.sigmoid(-margin_B).view(1, -1, 1, 1, 1)
    want_gradient = pull_B * sign * beta / 2 * 2 * (velocity - (noise - clean)) / size
    torch.testing.assert_close(loss_B.double(), want, rtol=1e-4, atol=1e-6 * beta)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-3, atol=1e-6 * beta)
    torch.testing.assert_close(stats["dpo/margin"].double(), margin_B, rtol=1e-4, atol=1e-6 * beta)
    torch.testing.assert_close(stats["dpo/chosen_reward"].double(), reward[0], rtol=1e-4, atol=1e-6 * beta)
    torch.testing.assert_close(stats["dpo/rejected_reward"].double(), reward[1], rtol=1e-4, atol=1e-6 * beta)
    assert stats["dpo/accuracy"].tolist() == (margin_B > 0).double().tolist()


def test_at_the_reference_the_loss_is_log_2_and_the_gradient_that_of_the_difference_of_errors():
    velocity, _, clean, noise = case(1)
    loss_B, gradient, stats = loss_and_gradient(dpo(500.0), velocity, velocity, clean, noise)
    torch.testing.assert_close(loss_B, torch.full((3,), math.log(2)))
    velocity = velocity.requires_grad_()
    errors = errors_of(velocity, clean, noise)
    (want,) = torch.autograd.grad(500.0 / 4 * (errors[0] - errors[1]).sum(), velocity)
    torch.testing.assert_close(gradient, want)
    assert stats["dpo/accuracy"].tolist() == [0.5] * 3  # policy and reference are equal: neutral
    assert stats["dpo/margin"].tolist() == [0.0] * 3


def test_swapping_the_two_media_flips_the_sign():
    there = loss_and_gradient(dpo(), *case(2))
    back = loss_and_gradient(dpo(), *(tensor.flip(0) for tensor in case(2)))
    torch.testing.assert_close(back[2]["dpo/margin"], -there[2]["dpo/margin"])
    torch.testing.assert_close(back[2]["dpo/accuracy"], 1 - there[2]["dpo/accuracy"])
    torch.testing.assert_close(back[0] - there[0], there[2]["dpo/margin"], rtol=1e-4, atol=1e-4)  # l(-m) - l(m) = m


@given(st.floats(-1e6, 1e6))
def test_the_loss_is_finite_for_any_margin(margin):
    rewards = torch.tensor([[margin / 2], [-margin / 2]], dtype=torch.float64, requires_grad=True)
    loss_B = preference_loss(rewards)
    (gradient,) = torch.autograd.grad(loss_B.sum(), rewards)
    assert loss_B.item() >= 0
    assert loss_B.item() == pytest.approx(max(-margin, 0), abs=math.log(2) + 1e-9)
    assert gradient.isfinite().all()
    assert gradient[0].item() <= 0 <= gradient[1].item()


def test_a_held_out_pair_is_evaluated_by_its_mean_over_noise_levels():
    errors = torch.tensor([[[0.1, 0.9], [0.5, 0.5]], [[0.5, 0.6], [0.2, 0.4]]], dtype=torch.float64)  # [2, N, L]
    ref = torch.full((2, 2, 2), 0.5, dtype=torch.float64)
    loss_NL, stats = dpo(2.0).validation_loss(errors, {"ref": ref})
    margins = errors[1] - errors[0]  # .4 and -.3: positive mean; -.3 and -.1: negative mean
    torch.testing.assert_close(loss_NL, torch.log1p(torch.exp(-margins)))
    assert stats["accuracy"].tolist() == [1.0, 0.0]


@check_each(("ours", "theirs"), [((2, 3), (2, 1)), ((1, 3), (1, 3)), ((3, 2), (3, 2)), ((2,), (2,))])
def test_errors_that_are_no_pairs_are_refused(ours, theirs):
    with pytest.raises(ValueError, match=r"must both be \[2, ...\]"):
        implicit_rewards(torch.zeros(ours), torch.zeros(theirs), 1.0)
