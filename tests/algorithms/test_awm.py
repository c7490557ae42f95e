"""AWM loss compared with the published formula in float64, and its properties."""

from types import SimpleNamespace

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.awm import matching_log_prob
from wfm_ds.algorithms.supervised import velocity_errors

GRID = torch.tensor([1, 0.913349, 0.790368, 0.602151, 0.278049, 0], dtype=torch.float64)
ADVANTAGES = [0.7, -5.0, 5.0, -0.4]
SHAPE = (4, 3, 5)


def algorithm(*, ema=None, **keys):
    return build_rl_algorithm(rl_recipe({"name": "awm", **keys}, ema=ema), GRID)


def batch_of(rl, advantages=ADVANTAGES, update=0):
    draw = torch.Generator().manual_seed(5)
    samples = [make_rollout(i, torch.randn(SHAPE, generator=draw)) for i in range(len(advantages))]
    terms = rl.updates(on_one_rank(samples), advantages, 1)[update]
    return rl.assemble(terms, samples, torch.device("cpu"))


def predictions(batch, *policies, apart=0.1):
    """Return the velocities of the trained policy and of other policies, which differ from it by about `apart`."""
    draw = torch.Generator().manual_seed(7)
    velocity = torch.randn(batch.clean_latents.shape, generator=draw)
    others = {name: velocity + apart * torch.randn(velocity.shape, generator=draw) for name in policies}
    return velocity.requires_grad_(), others


def evaluated(rl, batch, velocity, others):
    loss, stats = rl.loss(velocity, batch, others)
    return loss.detach(), stats, torch.autograd.grad(loss.sum(), velocity)[0]


def published(rl, batch, velocity, others):
    """Return loss [B] and gradient of the authors' code in float64, for the advantages of the samples in `batch`."""
    s, x0, eps, sigma = rl.settings, batch.clean_latents.double(), batch.noise.double(), batch.sigma.double()

    def log_prob(v):
        l = ((v - (eps - x0)) ** 2).flatten(1).mean(1)  # noqa: E741
        return {
            "uniform": -l,
            "sigma": -l * sigma,
            "sigma_squared": -l * sigma**2,
            "ghuber": -((l + 1e-10) ** s.power - 1e-10**s.power) * sigma / s.power,
        }[s.weighting]

    v = velocity.detach().double().requires_grad_()
    old = log_prob(others["old"].double()) if "old" in others else log_prob(v).detach()
    ratio = torch.exp(log_prob(v) - old)
    terms = len(batch.sigma) // len(ADVANTAGES)
    a = torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(terms).clamp(-5, 5) / 5 * s.adv_max
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio))
    for name, beta in (("ref", s.kl_beta), ("ema", s.ema_kl_beta)):
        if beta > 0:
            loss = loss + beta * ((v - others[name].double()) ** 2).flatten(1).mean(1)
    return loss.detach(), torch.autograd.grad(loss.sum(), v)[0]


@check_each("later", [False, True])
@check_each(
    "keys",
    [
        {},
        {"weighting": "uniform", "kl_beta": 0, "clip_ratio": 0.01, "adv_max": 5.0},
        {"weighting": "sigma", "ema_kl_beta": 1.0, "ema": {"decay": 0.3}},
        {"weighting": "sigma_squared", "kl_beta": 0.3, "clip_ratio": 0.01},
        {"power": 0.5, "kl_beta": 0.3, "ema_kl_beta": 0.7, "ema": {"decay": 0.3}, "clip_ratio": 0.02},
    ],
)
def test_loss_and_gradient_are_the_published_ones_in_float64(keys, later):
    rl = algorithm(**keys)
    batch = batch_of(rl)
    velocity, others = predictions(batch, *(["old"] if later else []), *rl.kl_betas)
    loss, stats, gradient = evaluated(rl, batch, velocity, others)
    want, want_gradient = published(rl, batch, velocity, others)
    assert (loss.shape, loss.dtype) == (batch.sigma.shape, torch.float32)
    torch.testing.assert_close(loss.double(), want, rtol=0, atol=3e-6 * want.abs().max().item())
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=1e-5 * want_gradient.abs().max().item())
    active = stats["policy/clip_fraction_active"]
    assert active.any() == (later and rl.settings.clip_ratio < 1)
    assert stats["policy/ratio_max_abs_dev"].any() == later  # without an old policy every ratio is exactly 1
    assert stats["kl/ref" if rl.settings.kl_beta else "loss/policy"].shape == batch.sigma.shape


def test_uniform_and_unclipped_it_is_fine_tuning_weighted_by_the_advantage():
    rl = algorithm(weighting="uniform", kl_beta=0, clip_ratio=1e30)
    batch = batch_of(rl)
    velocity, _ = predictions(batch)
    gradient = evaluated(rl, batch, velocity, {})[2]
    of_sft = velocity_errors(velocity, batch.clean_latents, batch.noise)
    torch.testing.assert_close(gradient, torch.autograd.grad((batch.credit * of_sft).sum(), velocity)[0])


def test_zero_advantages_give_exactly_no_gradient_and_are_skipped():
    rl = algorithm(kl_beta=0)
    batch = batch_of(rl, [0.0] * 4)
    velocity, others = predictions(batch, "old")
    for references in ({}, others):
        assert not evaluated(rl, batch, velocity, references)[2].any()
    term = SimpleNamespace(advantage=0.0)
    assert not rl.has_gradient(term, {"train"})
    assert algorithm(kl_beta=0.1).has_gradient(term, {"train"})
    assert algorithm(kl_beta=0, ema_kl_beta=0.1, ema={}).has_gradient(term, {"train"})
    assert rl.settings.drops_zero_std
    assert not algorithm().settings.drops_zero_std


def test_only_the_needed_policies_are_evaluated():
    assert algorithm().references == ("old", "ref")
    assert algorithm(kl_beta=0).references == ("old",)
    assert algorithm(kl_beta=0, ema_kl_beta=1, ema={}).references == ("old", "ema")
    assert algorithm(kl_beta=0).settings.list_policies(None) == frozenset()
    assert algorithm().settings.list_policies(None) == {"ref"}


@check_each(
    ("keys", "message"),
    [
        (
            {"ema_kl_beta": 1.0},
            r"algorithm.ema_kl_beta needs averaged weights: add `ema: {decay: 0\.3}`, or set it to 0",
        ),
        ({"ema_kl_beta": 1.0, "ema": {"decay": 0}}, "algorithm.ema_kl_beta needs averaged weights"),
        ({"weighting": "sigma", "power": 0.5}, "power: only read with weighting: ghuber"),
        ({"power": 1.5}, "less than or equal to 1"),
    ],
)
def test_recipes_that_cannot_work_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**keys)


def test_inputs_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="one value per sample"):
        matching_log_prob(torch.ones(3), torch.ones(3, 1), "sigma", 1.0)
