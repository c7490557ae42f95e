import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wfm_ds.distributed.world import World
from wfm_ds.monitoring.meters import Meter


@pytest.fixture(scope="module")
def world():
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host_group=None)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A world of one needs no process group: its reductions are the identity."""
    monkeypatch.setattr(World, "_all_reduce", lambda self, values, op: {k: float(v) for k, v in values.items()})


def test_means_are_weighted_by_valid_terms_and_maxima_skip_dummies(world):
    meter = Meter()
    meter.add({"a": torch.tensor([1.0, 3.0]), "b_max": torch.tensor([5.0, 99.0])}, torch.tensor([1.0, 0.0]))
    meter.add({"a": torch.tensor([4.0, 7.0]), "b_max": torch.tensor([2.0, 6.0])}, torch.tensor([1.0, 1.0]))
    assert meter.collect(world) == {"a": 4.0, "b_max": 6.0}


def test_dummy_that_is_not_a_number_does_not_reach_the_mean(world):
    meter = Meter()
    meter.add({"a": torch.tensor([1.0, float("nan")])}, torch.tensor([1.0, 0.0]))
    assert meter.collect(world) == {"a": 1.0}


def test_metric_without_any_term_is_absent_and_not_zero(world):
    meter = Meter()
    meter.add({"a": torch.tensor([1.0]), "b_max": torch.tensor([1.0])}, torch.tensor([0.0]))
    assert meter.collect(world) == {}


def test_figures_added_together_are_those_of_each_alone(world):
    meter, alone = Meter(), Meter()
    for count in (3, 5):
        values = torch.randn(4, count, generator=torch.Generator().manual_seed(count))
        weight, mask = torch.ones(count).index_fill(0, torch.tensor([0]), 0.0), (values[3] > 0).float()
        stats = {"a": values[0], "b_std": values[1], "c": (values[2], mask), "d_std": (values[3], mask), "e_max": mask}
        meter.add(stats, weight)
        for name, stat in stats.items():
            alone.add({name: stat}, weight)
    assert meter.collect(world) == alone.collect(world)


def test_std_is_that_of_all_terms_of_all_batches(world):
    meter, values = Meter(), torch.tensor([1.0, 2.0, 4.0, 8.0])
    for part in values.split(2):
        meter.add({"a": part, "a_std": part}, torch.ones(2))
    assert meter.collect(world) == {"a": 3.75, "a_std": pytest.approx(float(values.double().std(correction=0)))}


def test_a_maximum_that_is_not_a_number_is_absent(world):
    meter = Meter()
    meter.add({"a_max": torch.tensor([1.0, math.nan])}, torch.tensor([1.0, 1.0]))
    assert meter.collect(world) == {}


class Dispatched(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_many_figures_cost_as_many_operations_as_few(world):
    def operations(num_names):
        meter, value = Meter(), torch.ones(3)
        stats = {f"{kind}{i}{end}": value for i in range(num_names) for kind in "ab" for end in ("", "_std", "_max")}
        with Dispatched() as seen:
            for _ in range(4):
                meter.add(stats, torch.ones(3))
            meter.collect(world)
        return seen.names

    assert operations(1) == operations(20)
    assert not [name for name in operations(20) if "_local_scalar_dense" in name]


def test_collecting_starts_anew(world):
    meter = Meter()
    meter.add({"a": torch.tensor([1.0])}, torch.tensor([1.0]))
    meter.collect(world)
    assert meter.collect(world) == {}
