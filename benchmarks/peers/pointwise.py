"""The pointwise formulas in eager torch, written as in the papers, with the usual step lookup on the host.

Functions `*_maths` take only tensors, so they can be compiled or captured in a CUDA graph. They are the faster
baseline.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def broadcast_batch(vector_B: Tensor, latents: Tensor) -> Tensor:
    return vector_B.view(-1, *[1] * (latents.ndim - 1))


def find_steps(sigmas: Tensor, wanted: Tensor) -> list[int]:
    """Return the index of each sample's sigma in the schedule, as a scheduler does for each sample and step."""
    return [int((sigmas == value).nonzero()[0].item()) for value in wanted]


def sde_maths(
    velocity: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of a Flow-SDE step (arXiv 2505.05470), shaped [B,1,..,1] or like x."""
    velocity, x = velocity.float(), x.float()
    dt = sigma_next - sigma
    std_t = torch.sqrt(sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))) * eta
    mean = x * (1 + std_t**2 / (2 * sigma) * dt) + velocity * (1 + std_t**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std_t * torch.sqrt(-1 * dt)


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    log_prob = (
        -((x_next.detach() - mean) ** 2) / (2 * std**2)
        - torch.log(std)
        - torch.log(torch.sqrt(2 * torch.as_tensor(math.pi, device=mean.device)))
    )
    return log_prob.mean(dim=tuple(range(1, log_prob.ndim)))


def sde_step_maths(
    velocity: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    mean, std = sde_maths(velocity, x, broadcast_batch(sigma, x), broadcast_batch(sigma_next, x), sigma_max, eta)
    x_next = mean + std * torch.randn_like(mean)
    return x_next, gaussian_log_prob(x_next, mean, std)


def sde_log_prob_maths(
    velocity: Tensor, x: Tensor, x_next: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, eta: float
) -> Tensor:
    mean, std = sde_maths(velocity, x, broadcast_batch(sigma, x), broadcast_batch(sigma_next, x), sigma_max, eta)
    return gaussian_log_prob(x_next.float(), mean, std)


def lookup_sigmas(sigmas: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sigma and sigma_next of each sample [B], and the second sigma of the schedule."""
    index = find_steps(sigmas, wanted)
    return sigmas[index], sigmas[[i + 1 for i in index]], sigmas[1]


def sde_step(velocity: Tensor, x: Tensor, sigmas: Tensor, wanted: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    return sde_step_maths(velocity, x, *lookup_sigmas(sigmas, wanted), eta)


def sde_log_prob(velocity: Tensor, x: Tensor, x_next: Tensor, sigmas: Tensor, wanted: Tensor, eta: float) -> Tensor:
    return sde_log_prob_maths(velocity, x, x_next, *lookup_sigmas(sigmas, wanted), eta)


def nft_loss(
    velocity: Tensor,
    old: Tensor,
    ref: Tensor | None,
    clean: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return DiffusionNFT's policy loss and KL [B] (arXiv 2509.16117), from x0 predictions, with float64 weights."""
    t = broadcast_batch(sigma, clean)
    noisy = (1 - t) * clean + t * noise
    axes = tuple(range(1, clean.ndim))
    losses = []
    for mixed in (beta * velocity + (1 - beta) * old.detach(), (1 + beta) * old.detach() - beta * velocity):
        predicted = noisy - t * mixed
        with torch.no_grad():
            weight = torch.abs(predicted.double() - clean.double()).mean(dim=axes, keepdim=True).clip(min=0.00001)
        losses.append(((predicted - clean) ** 2 / weight).mean(dim=axes))
    policy = reward_weight * losses[0] / beta + (1.0 - reward_weight) * losses[1] / beta
    kl = torch.zeros_like(policy) if ref is None else ((velocity - ref) ** 2).mean(dim=axes)
    return policy, kl


def nft_figures(velocity: Tensor, old: Tensor, ref: Tensor | None) -> list[Tensor]:
    """Return values that a trainer logs with the loss."""
    deviation = (velocity - old) ** 2
    return [deviation.mean(), deviation.max(), *([] if ref is None else [((old - ref) ** 2).mean()])]


def flow_noise(clean: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    noise = torch.randn_like(clean)
    t = broadcast_batch(sigma, clean)
    return (1 - t) * clean + t * noise, noise
