"""Means and maxima of one step, collected without a host synchronization per micro-batch.

monitor.py writes the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wfm_ds.distributed.world import World


class Meter:
    """Weighted statistics of a step over all of its loss terms and all replicas.

    A name that ends in `_std` is a population standard deviation, a name with the word `max` (`x_max`, `x_max_abs_dev`)
    is a maximum, and all others are means. Every rank must add the same names in the same order. Statistics with total
    weight 0 are omitted from the result.
    """

    def __init__(self) -> None:
        # On the device. Keys: the names added together. `x_std^2` is the mean square of `x_std`.
        self._sums: dict[tuple[str, ...], Tensor] = {}  # [2, N] float64: weighted values, weights
        self._maxima: dict[tuple[str, ...], Tensor] = {}  # [N]

    def add(self, stats: Mapping[str, Tensor | tuple[Tensor, Tensor]], weight_B: Tensor) -> None:
        """Add the statistics of a micro-batch. weight_B: weights [B] of its loss terms, 0 for padding.

        stats: {name: [B] tensor, detached}, or (values, mask) if only some loss terms have a value.
        """
        means = {name: stat for name, stat in stats.items() if not is_maximum(name)}
        squares = {f"{name}^2": stat for name, stat in means.items() if name.endswith("_std")}
        if means:
            names = (*means, *squares)
            sums = sum_weighted([*means.values(), *squares.values()], len(squares), weight_B)
            self._sums[names] = sums if names not in self._sums else self._sums[names].add_(sums)
        if len(means) < len(stats):
            names = tuple(name for name in stats if name not in means)
            value_NB, weight_NB = stack_stats([stats[name] for name in names], weight_B)
            biggest = torch.where(weight_NB > 0, value_NB, -torch.inf).amax(dim=1)
            self._maxima[names] = torch.maximum(self._maxima.get(names, biggest), biggest)

    def collect(self, world: World) -> dict[str, float]:
        """Return {name: value over all replicas} and reset the meter. Collective. Identical on every rank."""
        tensors = [*self._sums.values(), *self._maxima.values()]
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        maxima: dict[str, float] = {}
        # A single copy to the host for all values.
        numbers = iter(torch.cat([part.flatten().double() for part in tensors]).tolist() if tensors else [])
        for names in self._sums:
            for totals_by_name in (sums, weights):
                totals_by_name |= {name: totals_by_name.get(name, 0.0) + next(numbers) for name in names}
        for names in self._maxima:
            maxima |= {name: max(maxima.get(name, -math.inf), next(numbers)) for name in names}
        totals = world.sum_over_replicas(
            {f"s:{n}": v for n, v in sums.items()} | {f"w:{n}": v for n, v in weights.items()}
        )
        values = {n: totals[f"s:{n}"] / totals[f"w:{n}"] for n in sums if totals[f"w:{n}"] > 0}
        for name in [n for n in values if n.endswith("_std")]:
            values[name] = math.sqrt(max(0.0, values.pop(f"{name}^2") - values[name] ** 2))
        values |= {n: v for n, v in world.max_over_ranks(maxima).items() if v > -torch.inf}
        self.__init__()  # type: ignore[misc]
        return values


def is_maximum(name: str) -> bool:
    return "max" in name.rpartition("/")[2].split("_")


def stack_stats(stats: Sequence[Tensor | tuple[Tensor, Tensor]], weight_B: Tensor) -> tuple[Tensor, Tensor]:
    """Stack N statistics into values [N, B] and weights [N, B]. A masked loss term has weight 0."""
    value_NB = torch.stack([stat[0] if isinstance(stat, tuple) else stat for stat in stats])
    if not any(isinstance(stat, tuple) for stat in stats):
        return value_NB, weight_B.expand_as(value_NB)
    everywhere = torch.ones_like(weight_B)
    mask_NB = torch.stack([stat[1] if isinstance(stat, tuple) else everywhere for stat in stats])
    return value_NB, weight_B * mask_NB


def sum_weighted(stats: Sequence[Tensor | tuple[Tensor, Tensor]], num_squared: int, weight_B: Tensor) -> Tensor:
    """Return weighted sums and sums of weights of N statistics, [2, N] float64. Squares the last `num_squared`."""
    value_NB, weight_NB = stack_stats(stats, weight_B)
    value_NB = value_NB.double()
    if num_squared:
        value_NB[-num_squared:].square_()
    # A product is not enough, because the values of padding may be NaN.
    return torch.stack([torch.where(weight_NB > 0, value_NB * weight_NB, 0), weight_NB.double()]).sum(dim=2)
