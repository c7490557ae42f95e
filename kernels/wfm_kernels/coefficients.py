"""Coefficients of stochastic samplers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP_KINDS = ("flow_sde", "dance", "cps", "ode")
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def sde_coefficients(
    kind: str,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float | Tensor = 0.0,
    sigma_max: float | None = None,
) -> Tensor:
    """Return the five coefficients of each of B steps from sigma to sigma_next, [B,5] float64 on sigma's device.

    The columns are c_x, c_v, std, w and c0 in these formulas for latents x and velocity v:

        mean     = c_x * x + c_v * v
        x_next   = mean + std * z                     z ~ N(0, 1)
        log_prob = c0 - w * mean over elements of (x_next - mean)^2

    kind: `flow_sde` (arXiv 2505.05470), `dance` (2505.07818), `cps` (2509.05952) or `ode` (Euler; ignores eta).
    sigma, sigma_next: [B] floating point, 1 >= sigma >= sigma_next >= 0.
    eta: noise level, a number or [B], at least 0 (at most 1 for `cps`). The Flow-SDE and CPS papers call it `a`.
    sigma_max: second sigma of the whole schedule. In the term 1 - sigma of `flow_sde`, sigma is at most sigma_max.

    A step without noise has w = c0 = 0 and no policy gradient. All values are checked, so use CPU tensors, once per
    schedule. Raises ValueError for invalid shapes, ranges or kinds, for `flow_sde` at sigma 1 unless sigma_max is below
    1, and for `dance` at sigma 0.
    """
    if kind not in STEP_KINDS:
        raise ValueError(f"unknown kind of step {kind!r}; choose one of {', '.join(STEP_KINDS)}")
    s, after = _validate_sigmas(sigma, sigma_next)
    level = _validate_eta(eta, s, highest=1.0 if kind == "cps" else math.inf)
    dt = after - s
    if kind == "ode":
        return _stack_coefficients(torch.ones_like(s), dt, torch.zeros_like(s))
    if kind == "cps":
        noise_scale, std = after * torch.cos(level * (math.pi / 2)), after * torch.sin(level * (math.pi / 2))
        # The published log-prob of CPS omits the variance and the constants.
        return _stack_coefficients(
            (1 - after) + noise_scale, noise_scale * (1 - s) - s * (1 - after), std, published_form=True
        )
    if kind == "dance":
        if not bool((s > 0).all()):
            raise ValueError("a dance step must start at a sigma above 0")
        k, squared_diffusion = level.square() / (2 * s), level.square()
    else:
        clearance = 1 - _clamp_sigma(s, sigma_max)
        k, squared_diffusion = level.square() / (2 * clearance), level.square() * s / clearance
    # mean = x + dt * (v + k * (x + (1 - sigma) * v)), where k = squared_diffusion / (2 sigma)
    return _stack_coefficients(1 + k * dt, (1 + k * (1 - s)) * dt, (squared_diffusion * -dt).sqrt())


def _clamp_sigma(s: Tensor, sigma_max: float | None) -> Tensor:
    """Return sigma, but at most sigma_max, so that the term 1 - sigma of `flow_sde` is not 0."""
    bounded = s if sigma_max is None else s.clamp(max=sigma_max)
    if bool((bounded >= 1).any()):
        raise ValueError(
            f"flow_sde at sigma 1 needs a sigma_max below 1 (the second sigma of the schedule), got {sigma_max}"
        )
    return bounded


def _stack_coefficients(c_x: Tensor, c_v: Tensor, std: Tensor, *, published_form: bool = False) -> Tensor:
    noisy = std > 0
    divisor = torch.where(noisy, std, 1.0)
    w = torch.ones_like(std) if published_form else 0.5 / divisor.square()
    c0 = torch.zeros_like(std) if published_form else -divisor.log() - HALF_LOG_TWO_PI
    zero = torch.zeros_like(std)
    return torch.stack([c_x, c_v, std, torch.where(noisy, w, zero), torch.where(noisy, c0, zero)], dim=1)


def _validate_sigmas(sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    if sigma.ndim != 1 or sigma.shape != sigma_next.shape:
        raise ValueError(f"sigma and sigma_next must both be [B], got {list(sigma.shape)} and {list(sigma_next.shape)}")
    if not (sigma.is_floating_point() and sigma_next.is_floating_point()):
        raise ValueError(f"sigmas must be floating point, got {sigma.dtype} and {sigma_next.dtype}")
    s, after = sigma.double(), sigma_next.double()
    if not bool(((s <= 1) & (after <= s) & (after >= 0)).all()):  # also rejects NaN
        raise ValueError(f"expected 1 >= sigma >= sigma_next >= 0, got {s.tolist()} and {after.tolist()}")
    return s, after


def _validate_eta(eta: float | Tensor, sigma: Tensor, *, highest: float) -> Tensor:
    level = torch.as_tensor(eta, dtype=torch.float64, device=sigma.device)
    if level.shape not in (torch.Size([]), sigma.shape):
        raise ValueError(f"eta must be a number or [{len(sigma)}], got {list(level.shape)}")
    if not bool((level.isfinite() & (level >= 0) & (level <= highest)).all()):
        raise ValueError(f"eta must be finite, at least 0 and at most {highest}, got {level.tolist()}")
    return level.expand_as(sigma)
