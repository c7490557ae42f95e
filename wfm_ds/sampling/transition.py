"""Mean and log-probability of a stochastic denoising step: a Gaussian with a mean affine in the velocity."""

from __future__ import annotations

from torch import Tensor

from wfm_ds.sampling.shapes import sample_mean
from wfm_kernels import sde_log_prob

LOG_PROB_SCALE, LOG_PROB_OFFSET = 3, 4  # columns of wfm_kernels.sde_coefficients


def transition_mean(velocity: Tensor, latents: Tensor, coefficients: Tensor) -> Tensor:
    """Return the mean of the next latents, c_x * latents + c_v * velocity: [B, ...]. coefficients: [B,5] float64."""
    c_x, c_v = (coefficients[:, i].to(latents.dtype).view(-1, *[1] * (latents.ndim - 1)) for i in (0, 1))
    return c_x * latents + c_v * velocity


def transition_log_prob(
    velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the log-probability [B] of the next latents, averaged over the elements of each sample.

    Latents and velocity: [B, ...]; gradients flow to the velocity. coefficients: [B,5] float64. mask: as in
    sample_mean. Equal velocities give bit-identical results in rollout and training.
    """
    if mask is None:
        return sde_log_prob(velocity, latents, next_latents, coefficients)
    error = sample_mean((next_latents - transition_mean(velocity, latents, coefficients)).square(), mask)
    return (coefficients[:, LOG_PROB_OFFSET] - coefficients[:, LOG_PROB_SCALE] * error.double()).to(latents.dtype)
