import math
from statistics import NormalDist

import pytest
import torch

from each_case import check_each
from wfm_ds.algorithms.ddrl_losses import data_loss, draw_data_sigma, log_ratio, reference_kl
from wfm_ds.sampling.edm import Churn, make_edm_plan

FP64 = torch.float64
RATIO_NORMS = ("gaussian", "literal", "std_scaled")
STEPS = make_edm_plan(
    "edm_2ab", 8, Churn.from_settings(8, s_churn=1.0, s_t_min=0.0, s_t_max=math.inf, s_noise=1.0)
).steps
SHAPES = [(3, 2, 5, 4), (3, 2, 4, 3, 5)]


class Transitions:
    """B transitions in EDM coordinates, float64: states, predictions, means and outcomes."""

    def __init__(self, shape, indices=(0, 3, 6)):
        draw = torch.Generator().manual_seed(0)
        normal = lambda: torch.randn(shape, generator=draw, dtype=FP64)  # noqa: E731
        self.steps = [STEPS[k] for k in indices]
        self.velocity, self.old, self.ref = normal(), normal(), normal()
        self.before, self.noise = normal(), normal()
        self.state = normal() * self.column([1 + s.level for s in self.steps], 5 if len(shape) == 5 else 4)
        self.std = torch.tensor([s.std for s in self.steps], dtype=FP64)
        self.gain = torch.tensor([s.gain for s in self.steps], dtype=FP64)
        self.after = self.mean(self.old) + self.wide(self.std) * self.noise

    @staticmethod
    def column(values, ndim):
        return torch.tensor(values, dtype=FP64).view(-1, *[1] * (ndim - 1))

    def wide(self, vector):
        return vector.view(-1, *[1] * (self.noise.ndim - 1))

    def mean(self, velocity):
        keep, now, before, level, sigma = (
            self.column([getattr(s, name) for s in self.steps], velocity.ndim)
            for name in ("state_coef", "clean_coef", "previous_clean_coef", "level", "sigma")
        )
        clean = self.state / (1 + level) - sigma * velocity
        return keep * self.state + now * clean + before * self.before

    def q(self, velocity):
        errors = (self.after - self.mean(velocity)).square() - (self.after - self.mean(self.old)).square()
        return errors.flatten(1).mean(1)

    def log_ratio(self, norm="gaussian", velocity=None, free=None):
        v = self.velocity if velocity is None else velocity
        return log_ratio(v, self.old, self.noise, self.gain, self.std, norm=norm, mask=free)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_ratios_are_those_of_the_means_and_outcomes(shape):
    case = Transitions(shape)
    q = case.q(case.velocity)
    torch.testing.assert_close(case.log_ratio("gaussian"), -q / (2 * case.std**2))
    torch.testing.assert_close(case.log_ratio("literal"), -q)
    torch.testing.assert_close(case.log_ratio("std_scaled"), -q / (2 * case.std))


@check_each("norm", RATIO_NORMS)
def test_float32_is_precise_enough(norm):
    case = Transitions((3, 4, 16, 16))
    near = case.old + 1e-3 * case.velocity  # squaring the means first would lose all digits of this difference
    single = log_ratio(
        near.float(), case.old.float(), case.noise.float(), case.gain.float(), case.std.float(), norm=norm
    )
    torch.testing.assert_close(single.double(), case.log_ratio(norm, velocity=near), rtol=1e-3, atol=0)


@check_each("norm", RATIO_NORMS)
def test_the_ratio_is_exactly_one_when_the_policies_agree(norm):
    case = Transitions((3, 2, 5, 4))
    velocity = case.old.clone().requires_grad_()
    log_rho = case.log_ratio(norm, velocity=velocity)
    assert log_rho.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(log_rho.sum(), velocity)[0].abs().min() > 0


def given(shape, counts):
    frames = torch.arange(shape[2])
    return (frames >= torch.tensor(counts)[:, None]).to(FP64).view(-1, 1, shape[2], 1, 1)


def test_conditioning_frames_contribute_nothing():
    case = Transitions((3, 2, 4, 3, 5))
    free = given((3, 2, 4, 3, 5), [0, 1, 2])
    velocity = case.velocity.clone().requires_grad_()
    kl = reference_kl(velocity, case.ref, case.gain, case.std, norm="gaussian", mask=free)
    data = data_loss(velocity, case.before, case.noise, case.gain.abs().clamp(0, 0.9), free)
    terms = [case.log_ratio(velocity=velocity, free=free), kl, data]
    for term in terms:
        gradient = torch.autograd.grad(term.sum(), velocity, retain_graph=True)[0]
        assert torch.equal(gradient * (1 - free), torch.zeros_like(gradient))
    for i, count in enumerate([0, 1, 2]):
        cut = slice(count, None)
        part = [t[i : i + 1, :, cut] for t in (velocity, case.old, case.noise, case.ref, case.before)]
        of = (case.gain[i : i + 1], case.std[i : i + 1])
        alone = [
            log_ratio(part[0], part[1], part[2], *of, norm="gaussian"),
            reference_kl(part[0], part[3], *of, norm="gaussian"),
            data_loss(part[0], part[4], part[2], case.gain[i : i + 1].abs().clamp(0, 0.9)),
        ]
        for whole, want in zip(terms, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1], want)


def test_the_distance_to_the_reference_is_that_of_the_means():
    case = Transitions((3, 2, 5, 4))
    squared = (case.mean(case.velocity) - case.mean(case.ref)).square().flatten(1).mean(1)
    of = (case.velocity, case.ref, case.gain, case.std)
    torch.testing.assert_close(reference_kl(*of, norm="literal"), squared)
    for norm in ("gaussian", "std_scaled"):
        torch.testing.assert_close(reference_kl(*of, norm=norm), squared / (2 * case.std**2))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_data_term_is_the_edm_loss(shape):
    case, level = Transitions(shape), torch.tensor([150.0, 2.0, 0.05], dtype=FP64)
    sigma, clean = level / (1 + level), case.before
    noisy = (clean + case.wide(level) * case.noise) / (1 + case.wide(level))
    x0_hat = noisy - case.wide(sigma) * case.velocity
    weight = (1 + level**2) / level**2
    want = weight * (clean - x0_hat).square().flatten(1).mean(1)
    torch.testing.assert_close(data_loss(case.velocity, clean, case.noise, sigma), want)


@pytest.mark.parametrize("video", [False, True])
def test_data_levels_follow_the_density_of_the_base_model(video):
    sigmas = [draw_data_sigma(0, step, "sample", video=video) for step in range(4000)]
    assert len(set(sigmas)) == 4000
    assert all(0 < s < 1 for s in sigmas)
    logits = sorted(math.log(s / (1 - s)) for s in sigmas)
    law = NormalDist(2.975 if video else math.log(4), 1.2)
    low, high = math.log(200), math.log(1e5)

    def cdf(x):
        return 0.95 * law.cdf(x) + 0.05 * min(max((x - low) / (high - low), 0), 1)

    distance = max(abs(cdf(x) - (i + 0.5) / 4000) for i, x in enumerate(logits)) + 0.5 / 4000
    assert distance * math.sqrt(4000) < 1.95  # Kolmogorov-Smirnov test, 99.9 % quantile


def test_mismatched_inputs_are_refused():
    case = Transitions((3, 2, 5, 4))
    with pytest.raises(ValueError, match=r"gain must be \[3\]"):
        log_ratio(case.velocity, case.old, case.noise, case.gain[:, None], case.std, norm="gaussian")
    with pytest.raises(ValueError, match="the same shape"):
        log_ratio(case.velocity, case.old[:, :, :1], case.noise, case.gain, case.std, norm="gaussian")
