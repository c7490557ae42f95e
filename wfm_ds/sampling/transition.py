"""A stochastic denoise step as what it is: a draw from a Gaussian whose mean is affine in the velocity."""

from __future__ import annotations

from torch import Tensor

from wfm_ds.sampling.shapes import sample_mean
from wfm_kernels import sde_log_prob

SCALE, OFFSET = 3, 4  # columns of wfm_kernels.sde_coefficients


def transition_mean(velocity: Tensor, latents: Tensor, coefficients: Tensor) -> Tensor:
    """Return c_x * latents + c_v * velocity, the mean of the next latents: [B, ...]. coefficients [B,5] float64."""
    c_x, c_v = (coefficients[:, i].to(latents.dtype).view(-1, *[1] * (latents.ndim - 1)) for i in (0, 1))
    return c_x * latents + c_v * velocity


def transition_log_prob(
    velocity: Tensor, latents: Tensor, next_latents: Tensor, coefficients: Tensor, free: Tensor | None = None
) -> Tensor:
    """Return the log-probability [B] of the next latents, a mean over the free elements of a sample.

    Latents and velocity [B, ...] of one shape, with gradient by the velocity; coefficients [B,5] float64; free as in
    sample_mean, None where all elements are. A rollout and training get the same bits for the same velocity.
    """
    if free is None:
        return sde_log_prob(velocity, latents, next_latents, coefficients)
    error = sample_mean((next_latents - transition_mean(velocity, latents, coefficients)).square(), free)
    return (coefficients[:, OFFSET] - coefficients[:, SCALE] * error.double()).to(latents.dtype)
