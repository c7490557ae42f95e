"""The seed contract: the keyed random draws that a run and its reference share. The reference shares nothing else."""

import numpy as np
import torch

from wfm_ds.seeds import derive_seed, draw_uniform
from wfm_kernels.torch_backend import normal_noise

__all__ = ["cpu_noise", "data_index", "derive_seed", "device_noise", "draw_uniform", "permutation", "shuffled"]


def shuffled(count, seed):
    """Return 0 .. count-1 in the order of one random 64-bit number per number."""
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable").tolist()


def permutation(count, seed, purpose, *key):
    """Return 0 .. count-1 in the order of one hash per number."""
    return sorted(range(count), key=lambda i: derive_seed(seed, purpose, *key, i))


def data_index(position, count, seed):
    """Return (epoch, index) of a position in the endless shuffled pass over `count` samples."""
    epoch, offset = divmod(position, count)
    return epoch, shuffled(count, derive_seed(seed, "data_order", epoch))[offset]


def cpu_noise(seeds, shape):
    """Return the noise that diffusers draws from a CPU generator with each of these seeds, [B, *shape] float64."""
    draws = [torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.cat(draws).double()


def device_noise(seeds, shape):
    """Return the noise of the noise contract of wfm_kernels, [B, *shape] float64."""
    numbers = normal_noise(torch.tensor(seeds, dtype=torch.int64), int(np.prod(shape)))
    return numbers.view(len(seeds), *shape).double()
