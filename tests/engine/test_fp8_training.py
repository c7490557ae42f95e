"""Training of all weights with products in float8: the same parameters, near values, and what stays exactly equal."""

import importlib.util

import pytest
import torch
from torch import nn

from multi_rank.training import inputs, small_sd3
from wfm_ds.engine import optional_packages
from wfm_ds.engine.fp8_training import train_in_float8
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file

CPU, BF16 = torch.device("cpu"), torch.bfloat16
BY_LIBRARY = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.narrow, self.norm_mod = nn.Linear(96, 64), nn.Linear(64, 8), nn.Linear(64, 64)

    def forward(self, x):
        return self.up(x)


def pair():
    torch.manual_seed(0)
    plain, converted = (nn.Sequential(Block()).to(BF16) for _ in range(2))
    converted.load_state_dict(plain.state_dict())
    return plain, converted


def relative(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@BY_LIBRARY
def test_the_parameters_are_the_same_ones():
    _, module = pair()
    before = dict(module.named_parameters())
    names = list(module.state_dict())
    assert train_in_float8(module, (Block,), "torchao", BF16, CPU) == 1  # neither modulation nor sides that do not fit
    assert type(module[0].up).__name__ == "Float8Linear"
    assert list(module.state_dict()) == names
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


@BY_LIBRARY
def test_values_and_gradients_stay_near_and_a_row_does_not_depend_on_its_batch():
    plain, module = pair()
    train_in_float8(module, (Block,), "torchao", BF16, CPU)
    draw = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(23, 5, size, generator=draw).to(BF16) for size in (96, 64))
    results = {}
    for name, network in (("plain", plain), ("float8", module)):
        given = x.clone().requires_grad_(True)
        found = network(given)
        found.backward(upstream)
        results[name] = [found.detach(), given.grad, network[0].up.weight.grad, network[0].up.bias.grad]
    for found, wanted, most in zip(results["float8"], results["plain"], (0.06, 0.06, 0.06, 0.01), strict=True):
        assert relative(found, wanted) < most
    assert relative(results["float8"][0], results["plain"][0]) > 0.01
    with torch.no_grad():
        assert torch.equal(module(x), results["float8"][0])  # no state that a forward moves
        assert all(torch.equal(module(x[i : i + 1])[0], results["float8"][0][i]) for i in range(len(x)))


@BY_LIBRARY
def test_everything_of_a_denoiser_trains():
    module = small_sd3().to(BF16)
    assert train_in_float8(module, (type(module.transformer_blocks[0]),), "torchao", BF16, CPU) > 10
    module(**inputs(range(2), BF16), return_dict=False)[0].float().square().mean().backward()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_it_is_refused_without_its_package(root, monkeypatch):
    monkeypatch.setattr(optional_packages, "find_spec", lambda package: None)
    recipe = recipe_file.load_recipe(root / "recipes" / "sd3_nft.yaml", ["lora=null", "model.fp8_training=torchao"])
    with pytest.raises(
        RecipeError, match=r"model\.fp8_training: torchao needs the package torchao, .* 'wfm_ds\[fp8\]'"
    ):
        optional_packages.require_packages(recipe)
    with pytest.raises(RecipeError, match="needs the package torchao"):
        train_in_float8(nn.Sequential(Block()), (Block,), "torchao", BF16, CPU)
