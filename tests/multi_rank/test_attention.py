"""Attention kernels under sequence parallelism: every attention call must use the selected kernel."""

import copy
from unittest import mock

import pytest
import torch.distributed as dist
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from multi_rank.sharing import CASES, built, forwards
from wfm_ds.engine.attention_kernels import KERNELS, attention_layers, current_kernel, use_kernel
from wfm_ds.ulysses.install import install_ulysses


def chosen_on_rank(name):
    """Replace the kernel by one that counts calls and runs torch's. Return the counts and the largest output error."""
    calls, table = [], _AttentionBackendRegistry._backends
    cudnn = KERNELS["cudnn"].backend

    def count(**arguments):
        calls.append(arguments["query"].shape[2])  # heads
        return table[AttentionBackendName.NATIVE](**arguments)

    case = CASES[name]
    whole = built(case, heads=4)
    shared = copy.deepcopy(whole)
    install_ulysses(shared, dist.group.WORLD)
    use_kernel(shared, "cudnn")
    with mock.patch.dict(table, {cudnn: count}):
        outputs, _ = forwards(shared, case, case.sizes)
    want, _ = forwards(whole, case, case.sizes)
    error = max(float((got - exact).abs().max()) for got, exact in zip(outputs, want, strict=True))
    return {
        "calls": len(calls),
        "fewest heads": min(calls),
        "layers": len(list(attention_layers(shared))),
        "forwards": len(case.sizes),
        "in use": current_kernel(shared),
        "error": error,
    }


@pytest.mark.parametrize("name", ["sd3", "wan", "cosmos25"])
def test_every_attention_call_of_two_ranks_reaches_the_chosen_kernel(name, two_ranks):
    for found in two_ranks.run(chosen_on_rank, name=name):
        assert found["calls"] == found["layers"] * found["forwards"]
        assert found["fewest heads"] == 2  # each rank has two of the four heads
        assert found["in use"] == "cudnn"
        assert found["error"] <= 1e-5
