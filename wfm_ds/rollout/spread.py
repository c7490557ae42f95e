"""Measures how different the generated samples of a prompt are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch

from wfm_ds.distributed.world import World
from wfm_ds.rollout.groups import StepRollouts
from wfm_ds.transport.arrays import pack_arrays, unpack_arrays

MAX_ELEMENTS = 4096  # maximum number of compared elements of a sample's latents


def measure_spread(world: World, rollouts: StepRollouts) -> dict[str, float]:
    """Return `rollout/spread`: the mean distance between two samples of a prompt in this RL step.

    All ranks must call this. The distance is the root mean square difference of clean latents, measured on up to
    MAX_ELEMENTS evenly spaced elements. Returns {} if no prompt has two finite samples.
    """
    rows = [
        pack_arrays({"latents": select_elements(sample.clean_latents)} if sample.is_finite else {})
        for sample in rollouts.local_rollouts
    ]
    packed = [row for part in world.gather_from_leaders(rows) for row in part]
    by_prompt: dict[str, list[npt.NDArray[np.float32]]] = defaultdict(list)
    for sample, row in zip(rollouts.samples, packed, strict=True):
        if row:
            by_prompt[sample.prompt.id].append(unpack_arrays(row)["latents"])
    distances = [
        math.sqrt(np.mean(np.square(one - other, dtype=np.float64)))
        for members in by_prompt.values()
        for one, other in itertools.combinations(members, 2)
    ]
    return {"rollout/spread": math.fsum(distances) / len(distances)} if distances else {}


def select_elements(latents: torch.Tensor) -> npt.NDArray[np.float32]:
    """Return at most MAX_ELEMENTS evenly spaced elements of the latents of one sample."""
    flat = latents.flatten()
    stride = math.ceil(len(flat) / MAX_ELEMENTS)
    chosen: npt.NDArray[np.float32] = flat[::stride].float().cpu().numpy()
    return chosen
