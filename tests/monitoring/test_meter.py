import pytest
import torch

from wfm_ds.distributed.world import World
from wfm_ds.monitoring.meter import Meter, Stopwatch


@pytest.fixture(scope="module")
def world():
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), host_group=None)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A world of one needs no process group: its reductions are the identity."""
    monkeypatch.setattr(World, "_reduce", lambda self, values, op: {k: float(v) for k, v in values.items()})


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


def test_collecting_starts_anew(world):
    meter = Meter()
    meter.add({"a": torch.tensor([1.0])}, torch.tensor([1.0]))
    meter.collect(world)
    assert meter.collect(world) == {}


def test_stopwatch_reports_each_phase_once_and_the_whole_step():
    timer = Stopwatch()
    with timer("train"), timer("decode"):
        pass
    times = timer.lap()
    assert set(times) == {"time/decode", "time/train", "time/step"}
    assert times["time/step"] >= times["time/train"] >= times["time/decode"] >= 0
    assert set(timer.lap()) == {"time/step"}
