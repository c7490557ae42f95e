"""The optimizer that a denoiser gets on each kind of device."""

import pytest
import torch
from torch import nn

from wfm_ds.engine.preparation import adamw, fused
from wfm_ds.recipe.sections import OptimizerRecipe

OPTIONS = OptimizerRecipe(lr=0.5, betas=(0.8, 0.9), eps=0.1, weight_decay=0.25)


@pytest.mark.parametrize(("device", "choice"), [("cuda", True), ("cuda:3", True), ("cpu", None)])
def test_adamw_is_one_kernel_on_a_gpu_and_torchs_choice_on_a_cpu(device, choice):
    assert fused(torch.device(device)) is choice
    made = adamw(nn.Linear(2, 2), OPTIONS, torch.device(device))
    assert made.defaults["fused"] is choice


def test_adamw_has_the_recipes_options_and_what_trains():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    made = adamw(layer, OPTIONS, torch.device("cpu"))
    assert made.param_groups[0]["params"] == [layer.weight]
    assert {name: made.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.5,
        "betas": (0.8, 0.9),
        "eps": 0.1,
        "weight_decay": 0.25,
    }
