"""Formulas of the traffic compared with values computed by hand, and predicted step times."""

import pytest

from benchmarks.scaling import HARDWARE, Cluster, Work, predict_rows, predict_step
from benchmarks.volumes import Network, Setting, pad_elements, ulysses_bytes, wire_bytes, zero_bytes

NETWORK = Network(trained=[10, 7], frozen=[5], blocks=[7])
SETTING = {"world": 4, "weight_bytes": 2, "micro_steps": 3}


def test_stages_1_and_2_reduce_gradients_and_gather_what_was_trained():
    assert (pad_elements([10, 7, 5], 4), pad_elements([8], 1)) == (12 + 8 + 8, 8)  # shards of equal size
    gathered = 2 * 24  # 17 elements, aligned to twice the ranks
    assert zero_bytes(NETWORK, Setting(stage=1, **SETTING)) == {"all-reduce": 4 * 17, "all-gather": gathered}
    assert zero_bytes(NETWORK, Setting(stage=2, **SETTING)) == {"all-reduce": 3 * 4 * 17, "all-gather": gathered}


def test_stage_3_gathers_all_weights_in_each_pass():
    plain = zero_bytes(NETWORK, Setting(stage=3, **SETTING))
    assert plain == {"all-gather": 2 * 3 * 2 * 28, "reduce-scatter": 3 * 4 * 20}
    again = zero_bytes(NETWORK, Setting(stage=3, checkpointing=True, forwards=5, **SETTING))
    assert again["all-gather"] == 2 * (3 * (2 * 28 + 8) + 5 * 28)


def test_a_single_rank_sends_nothing():
    for stage in (1, 2, 3):
        assert zero_bytes(NETWORK, Setting(stage=stage, world=1, weight_bytes=2, micro_steps=3)) == {}


def test_exchanges_of_equal_shards_shrink_with_more_ranks():
    """Eight tensors of a rank's shard: three sent and one returned, and their gradients. The result goes to all
    ranks."""

    def count_bytes(ranks):
        return ulysses_bytes([(24 // ranks, 24)], 8, 8 // ranks, 0, ranks=ranks, element_bytes=2, micro_steps=1)

    assert count_bytes(2) == 2 * 8 * 12 * 8
    assert count_bytes(4) == count_bytes(2) // 2


def test_ring_collectives_send_all_other_shards_and_an_all_reduce_sends_them_twice():
    assert wire_bytes("all-gather", 800.0, 8) == 700.0
    assert wire_bytes("all-reduce", 800.0, 8) == 1400.0
    assert wire_bytes("broadcast", 800.0, 8) == 800.0


@pytest.fixture
def cluster():
    return Cluster.read(HARDWARE)


def make_work(**changes):
    settings = {
        "title": "mine",
        "network": Network(trained=[2 * 10**9], frozen=[], blocks=[2 * 10**9]),
        "flops": 4e15,
        "micro_steps": 4,
        "updates": 1,
        "forwards": 0,
        "num_blocks": 30,
        "checkpointing": True,
        "stage": 3,
    }
    return Work(**settings | changes)


def test_bandwidth_is_that_of_the_links_in_a_node_and_of_the_adapters_between_nodes(cluster):
    assert cluster.seconds("all-gather", 8e9, 0, 8) == pytest.approx(7e9 / cluster.nvlink)
    slower = min(cluster.nvlink, 8 * cluster.network)
    assert cluster.seconds("all-gather", 16e9, 0, 16) == pytest.approx(15e9 / slower)
    doublings = cluster.latency + 2 * cluster.latency_per_doubling
    assert cluster.seconds("all-gather", 0.0, 10, 32) == pytest.approx(10 * doublings)


def test_a_step_takes_its_computation_and_exposed_communication(cluster):
    row = predict_step(make_work(), cluster, 16)
    assert row["computing, s"] == pytest.approx(4e15 / cluster.flops)
    sent = row["all-gather, s"] + row["reduce-scatter, s"]
    assert row["not hidden, s"] == pytest.approx((1 - cluster.overlap) * sent)
    assert row["step, s"] == pytest.approx(row["computing, s"] + row["not hidden, s"])
    idle = predict_step(make_work(flops=0.0), cluster, 16)
    assert idle["step, s"] == pytest.approx(idle["not hidden, s"]) == pytest.approx(sent)


def test_speed_per_gpu_never_increases_with_more_gpus(cluster):
    speeds = [row["speed a GPU, of that on 8"] for row in predict_rows(make_work(), cluster)]
    assert speeds[0] == 1.0
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] > 0.5


def test_the_table_states_its_assumptions(cluster):
    text = "\n".join(cluster.lines())
    for number in ("396 TFLOP/s", "338 GB/s of NVLink", "40 GB/s of network", "90%"):
        assert number in text
