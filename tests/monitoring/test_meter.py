import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from each_case import check_each
from wfm_ds.distributed.world import World
from wfm_ds.monitoring.meters import Meter


@pytest.fixture(scope="module")
def world():
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host_group=None)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Replace the all-reduce by the identity, for a single rank without a process group."""
    monkeypatch.setattr(World, "_all_reduce", lambda self, values, op: {k: float(v) for k, v in values.items()})


NAN = math.nan


@check_each(
    ("batches", "result"),
    [
        # Means have equal weight for each valid term, and maxima ignore padding.
        ([({"a": [1, 3], "b_max": [5, 99]}, [1, 0]), ({"a": [4, 7], "b_max": [2, 6]}, [1, 1])], {"a": 4, "b_max": 6}),
        ([({"a": [1, NAN]}, [1, 0])], {"a": 1}),  # padding may be NaN
        ([({"a": [1], "b_max": [1]}, [0])], {}),  # unknown values are omitted instead of 0
        ([({"a_max": [1, NAN]}, [1, 1])], {}),
        ([({"a": v, "a_std": v}, [1, 1]) for v in ([1, 2], [4, 8])], {"a": 3.75, "a_std": pytest.approx(7.1875**0.5)}),
    ],
)
def test_statistics_cover_all_terms_and_each_collection_resets_them(world, batches, result):
    meter = Meter()
    for stats, weights in batches:
        meter.add({n: torch.tensor(v, dtype=torch.float32) for n, v in stats.items()}, torch.tensor(weights).float())
    assert meter.collect(world) == result
    assert meter.collect(world) == {}


def test_values_added_together_equal_values_added_separately(world):
    meter, alone = Meter(), Meter()
    for count in (3, 5):
        values = torch.randn(4, count, generator=torch.Generator().manual_seed(count))
        weight, mask = torch.ones(count).index_fill(0, torch.tensor([0]), 0.0), (values[3] > 0).float()
        stats = {"a": values[0], "b_std": values[1], "c": (values[2], mask), "d_std": (values[3], mask), "e_max": mask}
        meter.add(stats, weight)
        for name, stat in stats.items():
            alone.add({name: stat}, weight)
    assert meter.collect(world) == alone.collect(world)


class Dispatched(TorchDispatchMode):
    """Record the dispatched operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_many_values_need_no_more_operations_than_few(world):
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
