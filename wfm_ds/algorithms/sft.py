"""Supervised fine-tuning: the velocity-matching loss, and the noise levels of all supervised algorithms.

The timestep shift converts a random number q in (0, 1) to a noise level sigma.
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

from wfm_ds.algorithms.base import QUANTILE_MARGIN, Stats
from wfm_ds.algorithms.supervised import SupervisedAlgorithm
from wfm_ds.recipe.algorithms import SftAlgorithm
from wfm_ds.sampling.latents import require_vectors
from wfm_ds.sampling.plan import apply_shift, invert_shift
from wfm_ds.seeds import draw_permutation, draw_uniform

if TYPE_CHECKING:
    from wfm_ds.recipe.algorithms import SupervisedSettings

NUM_BUCKETS = 8  # number of equal intervals of q, for the metrics sft/loss_bucket<j> and val/loss_bucket<j>
MAX_SIGMA_SQRT_WEIGHT = 100.0
MIN_SNR_GAMMA = 5.0


class Sft(SupervisedAlgorithm):
    """Velocity matching: the velocity error of each sample, weighted by its noise level."""

    area = "sft"
    settings: SftAlgorithm

    def loss(self, errors: Tensor, sigma: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, Stats]:
        require_vectors(errors[0], sigma=sigma)
        return loss_weight(self.settings.loss_weighting, sigma) * errors[0], {}

    def validation_loss(self, errors: Tensor, references: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """See SupervisedAlgorithm. The loss is unweighted, so runs with different loss weightings are comparable."""
        return errors[0], {}


def density_quantile(algorithm: SupervisedSettings, a: Tensor) -> Tensor:
    """Return the `a`-quantile of the density of q, for 0 < a < 1.

    The timestep_density `mode` is the density of mode sampling (arXiv 2403.03206).
    """
    match algorithm.timestep_density:
        case "uniform":
            return a.clone()
        case "logit_normal":
            return torch.sigmoid(algorithm.logit_mean + algorithm.logit_std * torch.special.ndtri(a))
        case "mode":
            return a + algorithm.mode_scale * (a - torch.sin(math.pi * a / 2).square())


@dataclass(frozen=True, slots=True)
class SigmaBand:
    """The range of noise levels of one expert, and the fractions of the training density below both ends."""

    low: float = 0.0  # sigma in [low, high); 1 belongs to the last band
    high: float = 1.0
    density_below_low: float = 0.0  # fractions of the density below low and below high
    density_below_high: float = 1.0


FULL_BAND = SigmaBand()


def density_bands(
    algorithm: SupervisedSettings, shift: float, ranges: Sequence[tuple[float, float]]
) -> list[SigmaBand]:
    """Return the SigmaBand of each expert. shift: flow shift. ranges: sigma range [low, high) of each expert."""
    return [
        SigmaBand(low, high, *(_density_below(algorithm, shift, sigma) for sigma in (low, high)))
        for low, high in ranges
    ]


def _density_below(algorithm: SupervisedSettings, shift: float, sigma: float) -> float:
    if sigma in (0.0, 1.0):
        return sigma
    q = float(invert_shift(torch.tensor(sigma, dtype=torch.float64), shift))
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        below = float(density_quantile(algorithm, torch.tensor(middle, dtype=torch.float64))) < q
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def draw_experts(bands: Sequence[SigmaBand], run_seed: int, step: int, num_micro_steps: int) -> list[int]:
    """Draw the expert to train in each micro-batch of an optimizer step. All ranks draw the same experts.

    The expected number of micro-batches of an expert is num_micro_steps * (its fraction of the training density). The
    drawn number differs from it by less than one.
    """
    ends = list(itertools.accumulate(band.density_below_high - band.density_below_low for band in bands))
    offset = draw_uniform(run_seed, "training_expert", step)
    order = draw_permutation(num_micro_steps, run_seed, "training_expert_order", step)
    draws = [(position + offset) / num_micro_steps * ends[-1] for position in order]
    return [next(expert for expert, end in enumerate(ends) if u < end) for u in draws]


def draw_training_sigmas(
    algorithm: SupervisedSettings,
    shift: float,
    *,
    run_seed: int,
    positions: Sequence[int],
    global_batch: int,
    band: SigmaBand = FULL_BAND,
) -> Tensor:
    """Draw the noise level of each sample of a micro-batch: [B] float32 in (0, 1] and within `band`, on the CPU.

    positions: index of each sample among all samples that the run trains on, over all epochs. A noise level does not
    depend on the rank. With `algorithm.stratified`, the density is split into global_batch parts of equal probability,
    and each sample of a global batch gets a noise level from a different part.
    """
    draws = [draw_uniform(run_seed, "training_sigma", position) for position in positions]
    if algorithm.stratified:
        places = (divmod(position, global_batch) for position in positions)
        strata = [_batch_strata(run_seed, batch, global_batch)[index] for batch, index in places]
        draws = [(stratum + u) / global_batch for stratum, u in zip(strata, draws, strict=True)]
    a = band.density_below_low + (band.density_below_high - band.density_below_low) * torch.tensor(
        draws, dtype=torch.float64
    )
    sigma = apply_shift(density_quantile(algorithm, a.clamp(QUANTILE_MARGIN, 1 - QUANTILE_MARGIN)), shift).float()
    return clamp_to_band(sigma, band)


def clamp_to_band(sigma: Tensor, band: SigmaBand) -> Tensor:
    """Clamp noise levels to `band`. Rounding to float32 may have moved them outside."""
    if band == FULL_BAND:
        return sigma
    low, high = (torch.tensor(end, dtype=torch.float64) for end in (band.low, band.high))
    minimum, maximum = low.float(), high.float()
    if minimum < low:
        minimum = minimum.nextafter(torch.tensor(1.0))
    if band.high < 1 and maximum >= high:
        maximum = maximum.nextafter(torch.tensor(0.0))
    return sigma.clamp(minimum, maximum)


@functools.lru_cache(maxsize=2)  # all samples of a global batch call it with the same arguments
def _batch_strata(run_seed: int, batch: int, global_batch: int) -> list[int]:
    return draw_permutation(global_batch, run_seed, "sigma_strata", batch)


def loss_weight(kind: str, sigma: Tensor) -> Tensor:
    """Return the weight of the squared velocity error, with the shape and dtype of sigma (in [0, 1]).

    The kinds sigma_sqrt (sigma^-2, at most 100) and cosmap are from diffusers' SD3 training script. The kinds edm
    (arXiv 2206.00364) and min_snr (arXiv 2303.09556, gamma 5) are published weights of x0 errors, converted to weights
    of velocity errors.
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
    return torch.minimum(data_square, MIN_SNR_GAMMA * noise_square)  # min_snr


def conditioning_frame_counts(num_frames: tuple[int, int], draws: Sequence[float]) -> Tensor | None:
    """Return the number of conditioning latent frames of each of B samples, [B] int64, or None if num_frames is (0, 0).

    num_frames: (smallest, largest) number. draws: one uniform random number in [0, 1) per sample.
    """
    low, high = num_frames
    if high == 0:
        return None
    return torch.tensor([low + int(u * (high - low + 1)) for u in draws])


def validation_sigmas(shift: float, num_levels: int = NUM_BUCKETS) -> Tensor:
    """Return the noise levels of the validation loss, [num_levels] float64.

    They are (j + 1/2)/num_levels for j = 0, 1, ..., after the timestep shift.
    """
    return apply_shift((torch.arange(num_levels, dtype=torch.float64) + 0.5) / num_levels, shift)


def bucket_index(sigma: Tensor, shift: float, num_buckets: int = NUM_BUCKETS) -> Tensor:
    """Return the number of the bucket of each noise level, int64, from 0 to num_buckets - 1.

    sigma is apply_shift(q, shift) for a number q from 0 to 1. The buckets are num_buckets equal intervals of q.
    """
    q = invert_shift(sigma.double(), shift)
    return (q * num_buckets).long().clamp(0, num_buckets - 1)
