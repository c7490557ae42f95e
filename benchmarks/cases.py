"""The operators to benchmark: inputs, our call, the plain formulas, and a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.peers import pointwise
from wfm_kernels import flow_noise, nft_loss, reference, sde_coefficients, sde_log_prob, sde_step
from wfm_kernels.torch_backend import normal_noise

SHAPES: Mapping[str, tuple[int, ...]] = {  # latents of real models
    "sd35_512_b1": (1, 16, 64, 64),
    "sd35_512_b9": (9, 16, 64, 64),
    "sd35_512_b32": (32, 16, 64, 64),
    "sana_1024_b9": (9, 32, 32, 32),
    "wan_480p_81f_b1": (1, 16, 21, 60, 104),
    "cosmos_720p_93f_b1": (1, 16, 24, 88, 160),
}
ETA, BETA = 0.7, 0.5
# ten steps with a shift of 3
SIGMAS = (1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0)
Backend = Literal["triton", "torch"]
Outputs = list[Tensor]


@dataclass(frozen=True)
class OperatorInputs:
    """bfloat16 velocities and float32 latents. Every sample has its own step of the schedule."""

    velocity: Tensor
    old: Tensor
    ref: Tensor
    x: Tensor
    x_next: Tensor
    noise: Tensor
    sigmas: Tensor  # the schedule, float32
    sigma: Tensor
    sigma_next: Tensor
    rows: Tensor
    seeds: Tensor
    reward_weight: Tensor
    upstream: Tensor

    @property
    def schedule(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sigma, self.sigma_next, self.sigmas[1]


def make_inputs(shape: tuple[int, ...], device: torch.device, seed: int) -> OperatorInputs:
    generator = torch.Generator(device).manual_seed(seed)

    def random_tensor(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    sigmas = torch.tensor(SIGMAS)
    index = torch.tensor([3 * b % 8 for b in range(shape[0])])
    sigma, sigma_next = sigmas[index], sigmas[index + 1]
    rows = sde_coefficients("flow_sde", sigma, sigma_next, eta=ETA, sigma_max=sigmas[1].item())
    velocity, x = random_tensor(torch.bfloat16), random_tensor()
    rows = rows.to(device)
    noise = random_tensor()
    x_next = sde_step(velocity, x, rows, noise=noise, backend="torch").next_latents
    return OperatorInputs(
        velocity=velocity.requires_grad_(),
        old=(velocity.detach().float() + 0.1 * random_tensor()).bfloat16(),
        ref=(velocity.detach().float() + 0.2 * random_tensor()).bfloat16(),
        x=x,
        x_next=x_next,
        noise=noise,
        sigmas=sigmas.to(device),
        sigma=sigma.to(device),
        sigma_next=sigma_next.to(device),
        rows=rows,
        seeds=torch.arange(shape[0], device=device) + 2**40 + seed,
        reward_weight=torch.rand(shape[0], generator=generator, device=device),
        upstream=torch.rand(shape[0], generator=generator, device=device) + 0.5,
    )


@dataclass(frozen=True)
class OperatorCase:
    """One operator.

    plain: the usual implementation, which looks up the current step on the host. maths: the same without this lookup,
    so that a CUDA graph can capture it.
    """

    name: str
    ours: Callable[[OperatorInputs, Backend], Outputs]
    plain: Callable[[OperatorInputs], Outputs]
    maths: Callable[[OperatorInputs], Outputs]
    truth: Callable[[OperatorInputs], Outputs]  # float64, for outputs that can be compared
    tolerances: tuple[float, ...]  # relative, for each output
    draws: bool = False  # draws its own noise, so the plain formulas cannot be compared


def _exact_step(i: OperatorInputs) -> tuple[Tensor, Tensor, Tensor]:
    velocity = i.velocity.detach().double().requires_grad_()
    levels = torch.full_like(i.sigma, ETA).double()
    mean, std = reference.sde_mean_and_std(
        "flow_sde", i.x.double(), velocity, i.sigma.double(), i.sigma_next.double(), levels, i.sigmas[1].item()
    )
    return velocity, mean, std


def _step_truth(i: OperatorInputs) -> Outputs:
    _, mean, std = _exact_step(i)
    x_next = mean + std * normal_noise(i.seeds, i.x[0].numel()).view(i.x.shape).double()
    return [x_next, reference.sde_log_prob("flow_sde", x_next, mean, std)]


def _log_prob_truth(i: OperatorInputs) -> Outputs:
    velocity, mean, std = _exact_step(i)
    log_prob = reference.sde_log_prob("flow_sde", i.x_next.double(), mean, std)
    return [log_prob, *torch.autograd.grad(log_prob, velocity, i.upstream.double())]


def _with_gradient(log_prob: Tensor, i: OperatorInputs) -> Outputs:
    return [log_prob, *torch.autograd.grad(log_prob, i.velocity, i.upstream)]


def _nft_ours(i: OperatorInputs, backend: Backend, ref: bool) -> Outputs:
    loss = nft_loss(
        i.velocity,
        i.old,
        i.x,
        i.noise,
        i.sigma,
        i.reward_weight,
        beta=BETA,
        ref_velocity=i.ref if ref else None,
        backend=backend,
    )
    parts = [loss.policy] if loss.kl is None else [loss.policy, loss.kl]
    return [*parts, *torch.autograd.grad(parts, i.velocity, [i.upstream] * len(parts))]


def _nft_plain(i: OperatorInputs, ref: bool) -> Outputs:
    v_ref = i.ref if ref else None
    policy, kl = pointwise.nft_loss(i.velocity, i.old, v_ref, i.x, i.noise, i.sigma, i.reward_weight, BETA)
    parts = [policy, kl] if ref else [policy]
    with torch.no_grad():
        pointwise.nft_figures(i.velocity, i.old, v_ref)
    return [*parts, *torch.autograd.grad(parts, i.velocity, [i.upstream] * len(parts))]


def _nft_truth(i: OperatorInputs, ref: bool) -> Outputs:
    velocity = i.velocity.detach().double().requires_grad_()
    old, clean, noise, sigma, r = (t.double() for t in (i.old, i.x, i.noise, i.sigma, i.reward_weight))
    want = reference.nft_loss(velocity, old, clean, noise, sigma, r, BETA, i.ref.double() if ref else None)
    parts = [want["policy"], want["kl"]] if ref else [want["policy"]]
    return [*parts, *torch.autograd.grad(parts, velocity, [i.upstream.double()] * len(parts))]


VALUE, BF16_GRADIENT = 5e-6, 3e-3
PLAIN = 1e-2  # tolerance of the plain formulas, which mix velocities in bfloat16


def _nft_case(name: str, ref: bool) -> OperatorCase:
    return OperatorCase(
        name=name,
        ours=lambda i, backend: _nft_ours(i, backend, ref),
        plain=lambda i: _nft_plain(i, ref),
        maths=lambda i: _nft_plain(i, ref),
        truth=lambda i: _nft_truth(i, ref),
        tolerances=(*[VALUE] * (1 + ref), BF16_GRADIENT),
    )


def _noise_truth(i: OperatorInputs) -> Outputs:
    drawn = normal_noise(i.seeds, i.x[0].numel()).view(i.x.shape).double()
    return [reference.flow_noise(i.x.double(), i.sigma.double(), drawn), drawn]


def _step_ours(i: OperatorInputs, backend: Backend) -> Outputs:
    step = sde_step(i.velocity, i.x, i.rows, seeds=i.seeds, backend=backend)
    return [step.next_latents, step.log_prob]


def _without_gradient(
    function: Callable[[OperatorInputs], tuple[Tensor, Tensor]],
) -> Callable[[OperatorInputs], Outputs]:
    def call_without_gradient(i: OperatorInputs) -> Outputs:
        with torch.no_grad():
            return list(function(i))

    return call_without_gradient


CASES = (
    OperatorCase(
        "sde_step",
        _step_ours,
        _without_gradient(lambda i: pointwise.sde_step(i.velocity, i.x, i.sigmas, i.sigma, ETA)),
        _without_gradient(lambda i: pointwise.sde_step_maths(i.velocity, i.x, *i.schedule, ETA)),
        _step_truth,
        (VALUE, VALUE),
        draws=True,
    ),
    OperatorCase(
        "sde_log_prob, forward and backward",
        lambda i, backend: _with_gradient(sde_log_prob(i.velocity, i.x, i.x_next, i.rows, backend=backend), i),
        lambda i: _with_gradient(pointwise.sde_log_prob(i.velocity, i.x, i.x_next, i.sigmas, i.sigma, ETA), i),
        lambda i: _with_gradient(pointwise.sde_log_prob_maths(i.velocity, i.x, i.x_next, *i.schedule, ETA), i),
        _log_prob_truth,
        (VALUE, BF16_GRADIENT),
    ),
    _nft_case("nft_loss, forward and backward", ref=False),
    _nft_case("nft_loss with reference, forward and backward", ref=True),
    OperatorCase(
        "flow_noise",
        lambda i, backend: list(flow_noise(i.x, i.sigma, seeds=i.seeds, backend=backend)),
        _without_gradient(lambda i: pointwise.flow_noise(i.x, i.sigma)),
        _without_gradient(lambda i: pointwise.flow_noise(i.x, i.sigma)),
        _noise_truth,
        (VALUE, VALUE),
        draws=True,
    ),
)


def relative_errors(case: OperatorCase, i: OperatorInputs, outputs: Outputs) -> list[float]:
    """Return the relative error (norm) of each output against float64; not finite if the output is not."""
    pairs = zip(outputs, case.truth(i), strict=True)
    return [((got.detach().double() - want).norm() / want.norm()).item() for got, want in pairs]
