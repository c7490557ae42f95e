"""FLOPs and bytes of a roofline agree with the counter of benchmarks/flops.py and with single operators."""

import pytest
import torch
from torch import nn

from benchmarks.flops import CountedModel
from benchmarks.released import RELEASED
from benchmarks.roofline import Attention, Costs, Operators, count_costs, roofline_row
from wfm_ds.memory.forward_counts import count_flops


def test_flops_of_a_forward_are_those_of_the_counter():
    known = RELEASED["sd35m"]
    costs, tokens, weights = count_costs(known, 2)
    subject = CountedModel.from_released(known)
    expected = count_flops(subject.model, subject.model.latent_shape(*known.size), subject.texts(False)).forward
    assert sum(flops for flops, _ in [*costs.products, *costs.attention]) == 2 * expected
    assert tokens == 1024
    assert weights == pytest.approx(4.5e9, rel=0.02)
    assert all(flops == 0 for flops, _ in costs.others)


def test_an_operator_reads_and_writes_each_tensor_once():
    costs = Costs()
    x, layer = torch.empty(8, 16, device="meta"), nn.Linear(16, 32, bias=False, device="meta")
    with torch.no_grad(), Operators(costs), Attention(costs):
        y = layer(x)
        z = y + y
        z.view(2, 4, 1, 32).transpose(1, 2)
        nn.functional.scaled_dot_product_attention(*[torch.empty(2, 3, 5, 8, device="meta")] * 3)
    assert costs.products == [(2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32 + 8 * 32))]
    assert costs.others == [(0, 4 * 2 * 8 * 32)]
    assert costs.attention == [(4 * 2 * 3 * 5 * 5 * 8, 4 * 4 * 2 * 3 * 5 * 8)]


def test_an_eager_forward_takes_at_least_the_time_of_its_products():
    found = roofline_row("sd35m", tflops=790.0, tbytes=2.9)
    assert found["ms of FLOPs alone"] <= found["ms, products alone"] < found["ms, eager"]
    assert found["most that fusing gains"] == pytest.approx(found["ms, eager"] / found["ms, products alone"])
    slower = roofline_row("sd35m", tflops=790.0, tbytes=1.45)
    assert found["ms, eager"] < slower["ms, eager"] <= 2 * found["ms, eager"]
