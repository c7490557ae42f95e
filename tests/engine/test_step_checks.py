"""Trainable parameters without gradient: reported before the first step, except for parts unused in the step."""

import pytest
import torch
from torch import nn

from wfm_ds.distributed.world import World
from wfm_ds.engine.step_checks import GradientWatch
from wfm_ds.errors import ModelError

WORLD = World.single_process()


def two_parts():
    return nn.ModuleDict({part: nn.Linear(2, 2) for part in ("first", "second")})


def backward(module, part):
    module[part](torch.ones(1, 2)).sum().backward()


def test_parameters_without_gradient_are_named_once():
    module = two_parts()
    reached = GradientWatch(module)
    backward(module, "first")
    with pytest.raises(
        ModelError, match=r"^second.weight, second.bias: trained parameters received no gradient"
    ) as refusal:
        reached.check_gradients(WORLD)
    assert refusal.value.agreed
    reached.check_gradients(WORLD)  # reported only the first time


def test_a_part_unused_in_a_step_is_checked_in_its_first_step():
    module = two_parts()
    reached = GradientWatch(module, find_part=lambda name: name.partition(".")[0])
    backward(module, "first")
    reached.check_gradients(WORLD)
    (module["second"].weight * torch.ones(2)).sum().backward()
    with pytest.raises(ModelError, match=r"^second.bias: "):
        reached.check_gradients(WORLD)


def test_each_adapter_is_checked_separately():
    module = nn.ModuleDict(
        {name: nn.ModuleDict({"default": nn.Linear(2, 2), "fake": nn.Linear(2, 2)}) for name in "ab"}
    )
    watches = {name: GradientWatch(module, adapter=name) for name in ("default", "fake")}
    module["a"]["fake"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(ModelError, match=r"^b.weight, b.bias: "):
        watches["fake"].check_gradients(WORLD)
    for name in "ab":
        module[name]["default"](torch.ones(1, 2)).sum().backward()
    watches["default"].check_gradients(WORLD)
    assert not watches["default"].watched


def test_a_zero_gradient_counts_and_frozen_parameters_need_none():
    module = two_parts()
    module["second"].requires_grad_(False)
    reached = GradientWatch(module)
    (0 * module["first"](torch.ones(1, 2))).sum().backward()
    reached.check_gradients(WORLD)


def test_an_adapter_of_a_frozen_layer_may_stay_without_gradient():
    module = nn.Module()
    module.layer = nn.Module()
    module.layer.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    GradientWatch(module, frozen={"layer.weight"}).check_gradients(WORLD)
    with pytest.raises(ModelError, match=r"^layer.lora_A.weight: "):
        GradientWatch(module).check_gradients(WORLD)


def test_many_are_counted():
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    with pytest.raises(ModelError, match=r"^0.weight, 0.bias, 1.weight and 5 more: "):
        GradientWatch(module).check_gradients(WORLD)
