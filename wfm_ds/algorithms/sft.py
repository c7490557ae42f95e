"""Supervised fine-tuning: the velocity-matching loss, and the noise levels at which any supervised algorithm trains.

Noise levels are drawn in q in (0, 1), which the family's shift turns into sigma; larger q means more noise.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wfm_ds.algorithms.base import Stats
from wfm_ds.algorithms.supervised import Supervised
from wfm_ds.algorithms.terms import EDGE, keyed_permutation
from wfm_ds.recipe.algorithms import SftAlgorithm
from wfm_ds.sampling.schedule import shifted, unshifted
from wfm_ds.sampling.shapes import require_vectors
from wfm_ds.seeds import uniform

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import SupervisedSettings

NUM_BUCKETS = 8  # equal parts of q, in sft/loss_bucket<j> and val/loss_bucket<j>
MAX_SIGMA_SQRT_WEIGHT = 100.0
MIN_SNR_GAMMA = 5.0


class Sft(Supervised):
    """Velocity matching: the error of each sample, weighted by its noise level."""

    area = "sft"
    settings: SftAlgorithm

    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        require_vectors(errors[0], sigma=sigma)
        return loss_weight(self.settings.loss_weighting, sigma) * errors[0], {}

    def held_out(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Unweighted, so that runs of different weightings can be compared."""
        return errors[0], {}


def density_quantile(algorithm: SupervisedSettings, a: Tensor) -> Tensor:
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


def density_bands(algorithm: SupervisedSettings, shift: float, ranges: Sequence[tuple[float, float]]) -> list[Band]:
    """Share the density among the experts with these [low, high) of sigma, in their order."""
    return [Band(low, high, *(_share_below(algorithm, shift, sigma) for sigma in (low, high))) for low, high in ranges]


def _share_below(algorithm: SupervisedSettings, shift: float, sigma: float) -> float:
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
    algorithm: SupervisedSettings,
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


def conditional_counts(num_frames: tuple[int, int], draws: Sequence[float]) -> Tensor | None:
    """The number of first latent frames that each sample is given: [B] int64, uniform over this range, both ends in it,
    by its draw in [0, 1). None where none is given."""
    low, high = num_frames
    if high == 0:
        return None
    return torch.tensor([low + int(u * (high - low + 1)) for u in draws])


def validation_sigmas(shift: float, num_levels: int = NUM_BUCKETS) -> Tensor:
    """The noise levels of the validation loss, [num_levels] float64: q = (j + 1/2)/num_levels, shifted."""
    return shifted((torch.arange(num_levels, dtype=torch.float64) + 0.5) / num_levels, shift)


def bucket_of(sigma: Tensor, shift: float, num_buckets: int = NUM_BUCKETS) -> Tensor:
    """The index of the equal part of q (of num_buckets) for each sigma: int64, shape and device of sigma."""
    q = unshifted(sigma.double(), shift)
    return (q * num_buckets).long().clamp(0, num_buckets - 1)
