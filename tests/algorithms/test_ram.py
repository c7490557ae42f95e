"""RAM loss compared with the published formula in float64, and its properties."""

import math

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm, engine_policy_copies
from wfm_ds.algorithms.ram import ram_loss

FP64 = torch.float64
SHAPES = [(1, 1, 1, 1), (3, 4, 7, 5), (3, 2, 3, 5, 2)]


def case(shape, dtype=torch.float32):
    """Return the inputs of ram_loss: both velocities, clean latents, noise and R."""
    draw = torch.Generator().manual_seed(3)
    velocity, ref, clean, noise = (torch.randn(shape, generator=draw, dtype=FP64).to(dtype) for _ in range(4))
    return velocity.requires_grad_(), ref, clean, noise, torch.tensor([2.5, -1.5, 0.3], dtype=dtype)[: shape[0]]


def gradient_of(velocity, *inputs):
    return torch.autograd.grad(ram_loss(velocity, *inputs).sum(), velocity)[0]


@check_each("shape", SHAPES)
def test_value_and_gradient_are_the_published_ones_in_float64(shape):
    inputs = case(shape)
    v, ref, x0, eps, r = (tensor.detach().double() for tensor in inputs)
    r = r.view(-1, *[1] * (v.ndim - 1))
    target = ref + r * ((eps - x0) - v)
    want = ((v - target) ** 2).flatten(1).mean(1)
    torch.testing.assert_close(ram_loss(*inputs).double(), want, rtol=1e-5, atol=0)
    want_gradient = 2 * (v - target) / v[0].numel()  # the target is detached
    atol = 1e-6 * want_gradient.abs().max().item()
    torch.testing.assert_close(gradient_of(*inputs).double(), want_gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("wrong", [{"tilt": torch.zeros(3, 1)}, {"noise": torch.zeros(3, 4, 7)}])
def test_other_shapes_are_refused(wrong):
    names = ("velocity", "ref_velocity", "clean", "noise", "tilt")
    inputs = dict(zip(names, case(SHAPES[1]), strict=True)) | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ram_loss(**inputs)


def recipe(**keys):
    return rl_recipe({"name": "ram", **keys}, sampling={"steps": 2})


@pytest.mark.parametrize(("tilt", "of"), [("linear", lambda r: r), ("exp", lambda r: math.exp(r) - 1)])
def test_the_weight_of_a_sample_depends_only_on_its_advantage(tilt, of):
    settings = recipe(tilt=tilt, multiplier=0.5)
    rl = build_rl_algorithm(settings, torch.tensor([1, 0.5, 0], dtype=FP64))
    draw = torch.Generator().manual_seed(0)
    advantages = [1.5, -0.7, 0.0, None]
    samples = [make_rollout(i, torch.randn(2, 3, 4, generator=draw)) for i in range(4)]
    [terms] = rl.updates(on_one_rank(samples), advantages, 1)
    batch = rl.assemble(terms, samples, torch.device("cpu"))
    want = [of(0.5 * (a or 0.0)) for a in advantages]
    assert batch.credit.tolist() == pytest.approx(want)
    assert batch.weight.tolist() == [1, 1, 1, 0]
    velocity, ref = (torch.randn(batch.clean_latents.shape, generator=draw) for _ in range(2))
    loss, stats = rl.loss(velocity.requires_grad_(), batch, {"ref": ref})
    assert torch.equal(loss, ram_loss(velocity, ref, batch.clean_latents, batch.noise, batch.credit))
    torch.testing.assert_close(stats["kl/ref"], (velocity.detach() - ref).square().flatten(1).mean(1))
    assert not any(stat.requires_grad for stat in stats.values())
    assert (rl.references, engine_policy_copies(settings)) == (("ref",), {"ref"})
    assert not settings.algorithm.drops_zero_std  # groups with equal rewards still train towards the reference


def test_overflowing_exponentials_are_refused():
    with pytest.raises(ValueError, match=r"multiplier 5 \* adv_clip_max 5 = 25 to be at most 10: lower one of them"):
        recipe(tilt="exp")
    recipe(tilt="exp", multiplier=2)
