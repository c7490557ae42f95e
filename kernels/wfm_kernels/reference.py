"""Reference implementations for tests and benchmarks: the published formulas, written independently of the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expand_per_sample(vector_B: Tensor, latents: Tensor) -> Tensor:
    """Reshape a vector with one value per sample to [B, 1, ..., 1], so that it broadcasts over the latents."""
    return vector_B.view(-1, *[1] * (latents.ndim - 1))


def sample_mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def sde_mean_and_std(
    kind: str, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: float | None
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the next latents, computed as in the papers that sde_coefficients cites."""
    s, after, level = expand_per_sample(sigma, x), expand_per_sample(sigma_next, x), expand_per_sample(eta, x)
    dt = after - s
    if kind == "flow_sde":
        bounded = s if sigma_max is None else torch.minimum(s, torch.as_tensor(sigma_max, dtype=s.dtype))
        std_t = torch.sqrt(s / (1 - bounded)) * level
        mean_t = x * (1 + std_t**2 / (2 * s) * dt) + v * (1 + std_t**2 * (1 - s) / (2 * s)) * dt
        return mean_t, std_t * torch.sqrt(-dt)
    if kind == "dance":
        clean = x - s * v
        score = -(x - (1 - s) * clean) / s**2
        return x + dt * v - 0.5 * level**2 * score * dt, level * torch.sqrt(-dt)
    if kind == "cps":
        clean, noise = x - s * v, x + (1 - s) * v
        std = after * torch.sin(level * math.pi / 2)
        return clean * (1 - after) + noise * torch.sqrt(after**2 - std**2), std
    return x + dt * v, torch.zeros_like(s)


def sde_log_prob(kind: str, x_next: Tensor, mean_t: Tensor, std: Tensor) -> Tensor:
    """Return each sample's log-probability, averaged over its elements, or 0 if the sample's std is 0."""
    squared = (x_next.detach() - mean_t) ** 2
    if kind == "cps":
        elements = -squared
    else:
        safe_std = torch.where(std > 0, std, 1.0)
        elements = -squared / (2 * safe_std**2) - torch.log(safe_std) - math.log(math.sqrt(2 * math.pi))
    return sample_mean(torch.where(std > 0, elements, 0.0))


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    clean_latents: Tensor,
    noise: Tensor,
    sigma: Tensor,
    reward_weight: Tensor,
    beta: float,
    ref_velocity: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return {name: one value per sample} like ops.nft_loss, but computed from x0 predictions (arXiv 2509.16117)."""
    s, old = expand_per_sample(sigma, clean_latents), old_velocity.detach()
    noisy = (1 - s) * clean_latents + s * noise
    positive = noisy - s * (beta * velocity + (1 - beta) * old) - clean_latents
    negative = noisy - s * ((1 + beta) * old - beta * velocity) - clean_latents
    weight = {name: sample_mean(e.detach().abs()).clamp_min(1e-5) for name, e in (("+", positive), ("-", negative))}
    loss = {"+": sample_mean(positive**2) / weight["+"], "-": sample_mean(negative**2) / weight["-"]}
    deviation = (velocity.detach() - old) ** 2
    results = {
        "policy": (reward_weight * loss["+"] + (1 - reward_weight) * loss["-"]) / beta,
        "loss_positive": loss["+"],
        "loss_negative": loss["-"],
        "weight_positive": weight["+"],
        "weight_negative": weight["-"],
        "old_deviation": sample_mean(deviation),
        "old_deviation_max": deviation.flatten(1).amax(1),
    }
    if ref_velocity is not None:
        results["kl"] = sample_mean((velocity - ref_velocity.detach()) ** 2)
        results["old_ref_deviation"] = sample_mean((old - ref_velocity.detach()) ** 2)
    return results


def flow_noise(clean_latents: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
    return (1 - expand_per_sample(sigma, clean_latents)) * clean_latents + expand_per_sample(
        sigma, clean_latents
    ) * noise
