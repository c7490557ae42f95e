"""Frozen layers in eight and four bits: error, products, gradients, and bitwise equalities."""

import importlib.util
import re

import pytest
import torch
from torch import nn

from families import CASES, PROMPTS
from kernel_cases import relative_error
from multi_rank.training import inputs, small_sd3
from wfm_ds.engine import optional_packages
from wfm_ds.engine.base_precision import LAYER_CLASSES, quantise_base
from wfm_ds.engine.low_bit_linear import Int8Linear
from wfm_ds.engine.policies import add_adapters
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sections import LoraRecipe

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
BY_LIBRARY = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
KINDS = ["int8", pytest.param("nf4", marks=BY_LIBRARY)]
# Relative error of a normal weight: int8 rounds to steps of max / 127, NF4 to 16 values.
ERRORS = {"int8": (0.004, 0.012), "nf4": (0.08, 0.11)}


def layer(kind, k, n, dtype=FP32):
    torch.manual_seed(k)
    made = nn.Linear(k, n).to(dtype)
    with torch.no_grad():
        made.weight.normal_()
    return made, LAYER_CLASSES[kind](made, dtype, CPU)


@pytest.mark.parametrize("k", [64, 96, 1536])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_the_bits(kind, k):
    plain, stored = layer(kind, k, 48)
    low, high = ERRORS[kind]
    assert low < relative_error(stored.weight, plain.weight) < high


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["fp8", *KINDS])
def test_products_and_gradients_are_those_of_the_stored_weight(kind, dtype):
    _, stored = layer(kind, 96, 64, dtype)
    x = torch.randn(4, 96, dtype=dtype, requires_grad=True)
    upstream = torch.randn(4, 64, dtype=dtype)
    found = stored(x)
    assert found.dtype == stored.weight.dtype == dtype
    if kind != "fp8":  # which also rounds the input
        assert torch.equal(found, nn.functional.linear(x, stored.weight, stored.bias))
    assert torch.equal(torch.autograd.grad(found, x, upstream)[0], upstream @ stored.weight)


@pytest.mark.parametrize("kind", ["fp8", *KINDS])
def test_casting_and_saving_a_module_do_not_change_the_stored_weight(kind):
    _, stored = layer(kind, 64, 32)
    before = stored.weight.clone()
    module = nn.Sequential(stored).to(BF16)
    assert module.state_dict().keys() == {"0.bias"}
    assert torch.equal(stored.weight, before)


def test_a_row_of_zeros_remains_zero():
    plain, _ = layer("int8", 64, 32)
    with torch.no_grad():
        plain.weight[3] = 0
    assert not Int8Linear(plain, FP32, CPU).weight[3].any()


@pytest.mark.parametrize("family", ["sd3", "sana_video"])
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), pytest.param("nf4", 0.25, marks=BY_LIBRARY)])
def test_predictions_change_only_slightly(kind, most, family, tiny_pipelines):
    case = CASES[family]
    model = registry.load_model(tiny_pipelines(family), dtype=BF16, device="cpu", **case.load_options)
    latents = torch.randn(2, *model.latent_shape(*case.size), generator=torch.Generator().manual_seed(0))
    conditioning, sigma_B = model.encode_text(PROMPTS), torch.tensor(case.sigmas[0])
    with torch.no_grad():
        plain = model.denoise(latents, sigma_B, conditioning)
        quantise_base(model.unwrapped_denoiser, model.block_classes, kind, BF16, CPU)
        assert 0 < relative_error(model.denoise(latents, sigma_B, conditioning), plain) < most


@pytest.mark.parametrize("kind", ["fp8", *KINDS])
def test_adapters_train_on_a_low_bit_base_and_equal_policies_predict_equal_bits(kind):
    module, twin = small_sd3(), small_sd3()
    quantise_base(module, (type(module.transformer_blocks[0]),), kind, FP32, CPU)
    adapters, _ = (
        add_adapters(m, LoraRecipe(rank=2, alpha=4), ["to_q", "to_out.0"], ["old"], seed=0) for m in (module, twin)
    )
    outcomes = {}
    for name in ("old", None, "default"):
        adapters.activate(name)
        outcomes[name] = module(**inputs(range(2), FP32), return_dict=False)[0]
    assert torch.equal(outcomes["default"], outcomes["old"])
    assert torch.equal(outcomes["default"], outcomes[None])  # B is zero
    outcomes["default"].square().mean().backward()
    twin(**inputs(range(2), FP32), return_dict=False)[0].square().mean().backward()
    gradients, wanted = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (module, twin))
    assert gradients.keys() == wanted.keys() != set()
    assert all(".default." in n for n in gradients)
    for name, gradient in gradients.items():
        if "lora_B" in name:
            assert 0 < relative_error(gradient, wanted[name]) < (0.8 if kind == "nf4" else 0.3), name


@pytest.mark.parametrize(
    ("override", "package", "extra"),
    [
        ("model.base_precision=nf4", "bitsandbytes", "'wfm_ds[low-bit]'"),
        ("optimizer.name=adamw8bit", "bitsandbytes", "'wfm_ds[low-bit]'"),
        ("model.fp8_training=torchao", "torchao", "'wfm_ds[fp8]'"),
        (
            "model.fp8_training=transformer_engine",
            "transformer_engine",
            "--no-build-isolation 'wfm_ds[transformer-engine]'",
        ),
    ],
)
def test_a_key_whose_package_is_missing_is_refused(override, package, extra, root, monkeypatch):
    monkeypatch.setattr(optional_packages, "find_spec", lambda package: None)
    name, full = ("sd3_image_sft", ["lora=null"]) if "fp8_training" in override else ("sd3_nft", [])
    recipe = recipe_file.load_recipe(root / "recipes" / f"{name}.yaml", [override, *full])
    said = re.escape(f"{override.replace('=', ': ')} needs the package {package}, which is not installed: ")
    with pytest.raises(RecipeError, match=said + re.escape(f"pip install {extra}, or remove the key")):
        optional_packages.require_packages(recipe)
