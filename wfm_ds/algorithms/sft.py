"""Supervised fine-tuning: the noise levels that samples are trained on, and the velocity-matching loss.

Noise levels are drawn in q in (0, 1), which the family's shift turns into sigma; larger q means more noise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.terms import keyed_permutation
from wfm_ds.sampling.schedule import shifted, unshifted
from wfm_ds.sampling.shapes import require_latents, require_vectors, sample_mean
from wfm_ds.seeds import uniform

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import SftAlgorithm

NUM_BUCKETS = 8  # equal parts of q, in sft/loss_bucket<j> and val/loss_bucket<j>
MAX_SIGMA_SQRT_WEIGHT = 100.0
MIN_SNR_GAMMA = 5.0
EDGE = 2.0**-33  # draws keep this distance from 0 and 1: sigma 0 has no velocity to learn


def density_quantile(algorithm: SftAlgorithm, a: Tensor) -> Tensor:
    """The q below which the share `a` of the density lies: a in (0, 1) float64, q of the same shape, increasing in a.

    `mode` is f_mode of the SD3 paper (arXiv 2403.03206), there written for 1 - a.
    """
    match algorithm.timestep_density:
        case "uniform":
            return a.clone()
        case "logit_normal":
            return torch.sigmoid(algorithm.logit_mean + algorithm.logit_std * torch.special.ndtri(a))
        case "mode":
            return a + algorithm.mode_scale * (a - torch.sin(math.pi * a / 2).square())


@dataclass(frozen=True, slots=True)
class Band:
    """The noise levels of one expert, and the part of the density that lies there."""

    low: float = 0.0  # sigma in [low, high), with 1 in the one that ends there
    high: float = 1.0
    a_low: float = 0.0  # shares of the density below low and below high
    a_high: float = 1.0


WHOLE = Band()


def density_bands(algorithm: SftAlgorithm, shift: float, ranges: Sequence[tuple[float, float]]) -> list[Band]:
    """Share the density among the experts with these [low, high) of sigma, in their order."""
    return [Band(low, high, *(_share_below(algorithm, shift, sigma) for sigma in (low, high))) for low, high in ranges]


def _share_below(algorithm: SftAlgorithm, shift: float, sigma: float) -> float:
    """The share of the density at noise levels below sigma in [0, 1]: density_quantile inverted by bisection."""
    if sigma in (0.0, 1.0):
        return sigma
    q = float(unshifted(torch.tensor(sigma, dtype=torch.float64), shift))
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = float(density_quantile(algorithm, torch.tensor(middle, dtype=torch.float64))) < q
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def drawn_experts(bands: Sequence[Band], run_seed: int, step: int, num_micro_steps: int) -> list[int]:
    """Draw the expert that all ranks train in each micro-step of an optimizer step.

    On average over steps an expert comes as often as its share of the density, in each of them as often up to rounding,
    in an order drawn for the step.
    """
    ends = list(itertools.accumulate(band.a_high - band.a_low for band in bands))
    offset = uniform(run_seed, "training_expert", step)
    order = keyed_permutation(num_micro_steps, run_seed, "training_expert_order", step)
    draws = [(place + offset) / num_micro_steps * ends[-1] for place in order]
    return [next(expert for expert, end in enumerate(ends) if u < end) for u in draws]


def training_sigmas(
    algorithm: SftAlgorithm,
    shift: float,
    *,
    run_seed: int,
    positions: Sequence[int],
    global_batch: int,
    band: Band = WHOLE,
) -> Tensor:
    """The noise level of each sample of a micro-batch: [B] float32 in (0, 1], and within `band`, on the CPU.

    positions: of the samples in the endless pass over the data, unique in a run; optimizer step s (from 1) trains
    those from (s-1)*global_batch up to s*global_batch. A level follows from (run_seed, position) alone, never from rank
    or micro-batch. With `algorithm.stratified` each position of a global batch draws from another one of global_batch
    equal parts of the density, dealt out by a permutation keyed by (run_seed, step).
    """
    draws = [uniform(run_seed, "training_sigma", position) for position in positions]
    if algorithm.stratified:
        parts = [_stratum(run_seed, position, global_batch) for position in positions]
        draws = [(part + u) / global_batch for part, u in zip(parts, draws, strict=True)]
    a = band.a_low + (band.a_high - band.a_low) * torch.tensor(draws, dtype=torch.float64)
    sigma = shifted(density_quantile(algorithm, a.clamp(EDGE, 1 - EDGE)), shift).float()
    return within(sigma, band)


def within(sigma: Tensor, band: Band) -> Tensor:
    """float32 noise levels that rounding may have moved across the ends of their band, put back."""
    if band == WHOLE:
        return sigma
    low, high = (torch.tensor(end, dtype=torch.float64) for end in (band.low, band.high))
    least, most = low.float(), high.float()
    if least < low:
        least = least.nextafter(torch.tensor(1.0))
    if band.high < 1 and most >= high:
        most = most.nextafter(torch.tensor(0.0))
    return sigma.clamp(least, most)


def _stratum(run_seed: int, position: int, global_batch: int) -> int:
    batch, place = divmod(position, global_batch)
    return _strata(run_seed, batch, global_batch)[place]


@functools.lru_cache(maxsize=2)  # asked for once per sample, the same for a whole global batch
def _strata(run_seed: int, batch: int, global_batch: int) -> list[int]:
    return keyed_permutation(global_batch, run_seed, "sigma_strata", batch)


def loss_weight(kind: str, sigma: Tensor) -> Tensor:
    """Weight of the squared velocity error, same shape and dtype as sigma (in [0, 1]). Raises ValueError if unknown.

    sigma_sqrt (sigma^-2, here at most 100) and cosmap are those of diffusers' SD3 training; edm (arXiv 2206.00364) and
    min_snr (arXiv 2303.09556, gamma 5) are turned from weights of x0 errors into weights of velocity errors.
    """
    data_square, noise_square = (1 - sigma).square(), sigma.square()
    match kind:
        case "none":
            return torch.ones_like(sigma)
        case "sigma_sqrt":
            return noise_square.reciprocal().clamp_max(MAX_SIGMA_SQRT_WEIGHT)
        case "cosmap":
            return 2 / (math.pi * (data_square + noise_square))
        case "edm":
            return data_square + noise_square
        case "min_snr":
            return torch.minimum(data_square, MIN_SNR_GAMMA * noise_square)
    raise ValueError(f"{kind!r} is not a loss weighting; choose none, sigma_sqrt, cosmap, edm and min_snr")


def flow_loss(
    velocity: Tensor,
    clean_latents: Tensor,
    noise: Tensor,
    sigma: Tensor,
    weighting: str = "none",
    *,
    conditional_mask: Tensor | None = None,
) -> Tensor:
    """weight(sigma) * mean((velocity - (noise - clean_latents))^2) of each sample: [B], unreduced.

    Latents and velocity [B,C,h,w] or [B,C,T,h,w] float32, sigma [B] float32. conditional_mask [B,1,T,1,1] float32: 1 on
    frames that were given to the network instead of predicted: the mean is over the others. ValueError for other
    shapes and dtypes.
    """
    require_latents(velocity=velocity, clean_latents=clean_latents, noise=noise)
    require_vectors(velocity, sigma=sigma)
    square_error = (velocity - (noise - clean_latents)).square()
    if conditional_mask is not None and conditional_mask.shape != (len(velocity), 1, *velocity.shape[2:3], 1, 1):
        raise ValueError(
            f"conditional_mask must be [B,1,T,1,1] for {list(velocity.shape)}, got {list(conditional_mask.shape)}"
        )
    free = None if conditional_mask is None else 1 - conditional_mask
    return loss_weight(weighting, sigma) * sample_mean(square_error, free)


def conditional_counts(algorithm: SftAlgorithm, draws: Sequence[float]) -> Tensor:
    """The number of first latent frames that each sample is given: [B] int64, uniform over the recipe's range by its
    draw in [0, 1)."""
    low, high = algorithm.min_num_conditional_frames, algorithm.max_num_conditional_frames
    return torch.tensor([low + int(u * (high - low + 1)) for u in draws])


def validation_sigmas(shift: float, num_levels: int = NUM_BUCKETS) -> Tensor:
    """The noise levels of the validation loss, [num_levels] float64: q = (j + 1/2)/num_levels, shifted."""
    return shifted((torch.arange(num_levels, dtype=torch.float64) + 0.5) / num_levels, shift)


def bucket_of(sigma: Tensor, shift: float, num_buckets: int = NUM_BUCKETS) -> Tensor:
    """The index of the equal part of q (of num_buckets) for each sigma: int64, shape and device of sigma."""
    q = unshifted(sigma.double(), shift)
    return (q * num_buckets).long().clamp(0, num_buckets - 1)
