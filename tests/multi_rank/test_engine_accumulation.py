"""The engine accumulates gradients in float32 for every weight dtype and ZeRO stage."""

import json

import pytest
import torch

from multi_rank.training import small_recipe
from wfm_ds.distributed.world import World
from wfm_ds.engine.engine import DenoiserEngine

MICRO_STEPS = 512
WIDTH = 8


def accumulated_norm(config, dtype, micro_steps):
    """Return the gradient norms of a linear layer after many equal micro-steps and after one of them."""
    torch.manual_seed(0)
    module, inputs = torch.nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH).to(getattr(torch, dtype))
    world = World.join()
    engine = DenoiserEngine.build(
        module,
        small_recipe(
            config, lora=False, model={"dtype": dtype}, engine={"max_grad_norm": 0}, optimizer={"warmup_steps": 1}
        ),
        world,
        lora_targets=(),
        policies=frozenset(),
        accumulation=micro_steps,
        total_updates=2,
    )
    norms = []
    for count in (micro_steps, 1):
        engine.expect_backwards(count)
        torch.manual_seed(1)
        for _ in range(count):
            engine.backward(engine.forward_module(inputs).float().square().mean(), count * world.size)
        engine.num_updates = 0  # the first update has learning rate 0, so both steps have the same weights
        norms.append(engine.step().grad_norm)
    return norms


def config_of(folder, name, zero):
    if not zero:
        return name
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}))
    return str(path)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = [
    pytest.param("zero1", {}, id="zero1"),
    pytest.param("bare", {"stage": 1, "overlap_comm": False, "contiguous_gradients": False}, id="zero1 without hooks"),
    pytest.param("offloaded1", {"stage": 1, **OFFLOAD}, id="zero1 offloaded"),
    pytest.param("offloaded2", {"stage": 2, **OFFLOAD}, id="zero2 offloaded"),
    pytest.param("zero2", {}, id="zero2"),
    pytest.param("zero3", {}, id="zero3"),
    pytest.param("zero3_offload", {}, id="zero3 offloaded"),
]


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_many_equal_micro_steps_have_the_gradient_of_one(two_ranks, tmp_path, name, zero):
    """A bfloat16 sum of 512 equal numbers would stop growing after 256 of them."""
    settings = {"config": config_of(tmp_path, name, zero), "dtype": "bfloat16", "micro_steps": MICRO_STEPS}
    for many, one in two_ranks.run(accumulated_norm, **settings):
        assert many == pytest.approx(one, rel=1e-5)
