"""Frozen layers in float8 e4m3: error, gradients, the quantized layers, and bitwise equalities."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from each_case import check_each
from families import CASES, PROMPTS, each_family
from kernel_cases import relative_error
from multi_rank.training import small_sd3
from wfm_ds.contract.family_under_test import FamilyUnderTest
from wfm_ds.engine import fp8_linear
from wfm_ds.engine.base_precision import quantise_base
from wfm_ds.engine.fp8_linear import Fp8Linear, Fp8TwiceLinear, fp8_matmul, last_input, require_fp8
from wfm_ds.engine.live_bytes import LiveByteCounter
from wfm_ds.engine.preparation import move_weights
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry
from wfm_ds.recipe.file import load_recipe
from wfm_ds.rollout.colocated import ColocatedSource
from wfm_kernels import quantise_rows

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


def layer(k, n, dtype=FP32, *, bias=True):
    torch.manual_seed(k)
    made = nn.Linear(k, n, bias=bias).to(dtype)
    with torch.no_grad():
        made.weight.normal_()
    return made, Fp8Linear(made, dtype, CPU)


@check_each("k", [64, 1536, 5120])
def test_the_error_matches_three_mantissa_bits(k):
    """Rounding to three bits has a relative error of 2.6 %; a product of two rounded factors has sqrt(2) times that."""
    plain, quantised = layer(k, 48, bias=False)
    x = torch.randn(32, k)
    assert 0.03 < relative_error(quantised(x), plain(x)) < 0.045


def test_products_are_those_of_the_stored_numbers():
    plain, quantised = layer(128, 48)
    x = torch.randn(5, 7, 128)
    values, scale = quantised.quantised_weight
    weight = values.double() * scale.double()
    assert relative_error(quantised.weight, plain.weight) < 0.03
    rows = Fp8Linear(nn.Linear(128, 35), FP32, CPU)  # rows of a weight are quantized like rows of an input
    rows.weight_bytes, rows.scale_bits = _quantised(x.view(35, 128))
    exact = rows.weight.double() @ weight.T + plain.bias.double()
    torch.testing.assert_close(quantised(x).view(35, 48), exact.float(), rtol=1e-6, atol=1e-6)


def _quantised(x):
    made = nn.Linear(x.shape[1], x.shape[0], bias=False)
    made.weight.data = x
    found = Fp8Linear(made, FP32, CPU)
    return found.weight_bytes, found.scale_bits


def test_a_second_copy_affects_only_the_gradient():
    plain, once = layer(96, 64, BF16)
    twice = Fp8TwiceLinear(plain, BF16, CPU)
    x = torch.randn(9, 96, dtype=BF16, requires_grad=True)
    upstream = torch.randn(9, 64, dtype=BF16)
    found = twice(x)
    assert torch.equal(found, once(x))
    (gradient,) = torch.autograd.grad(found, x, upstream)
    assert 0.02 < relative_error(gradient, upstream @ plain.weight) < 0.045
    for i in range(9):
        (alone,) = torch.autograd.grad(twice(x[i : i + 1]), x, upstream[i : i + 1])
        assert torch.equal(alone[i], gradient[i])


def test_a_row_does_not_depend_on_its_batch():
    _, quantised = layer(256, 80, BF16)
    x = torch.randn(9, 256).to(BF16) * torch.logspace(-3, 3, 9).unsqueeze(1)
    whole = quantised(x)
    assert all(torch.equal(quantised(x[i : i + 1])[0], whole[i]) for i in range(9))


@each_family()
def test_predictions_of_every_family_stay_near_and_a_sample_is_the_same_in_any_batch(family, tiny_pipelines):
    """Modulation and layers outside of blocks are not quantized, and quantization changes predictions only slightly. On
    a CPU, the last bit of a plain float32 product depends on the batch size; products of float8 rows do not."""
    case = CASES[family]
    subject = FamilyUnderTest(tiny_pipelines(family), case)
    model = subject.load_model(BF16)
    latents = torch.randn(2, *model.latent_shape(*case.size), generator=torch.Generator().manual_seed(0))
    conditioning = subject.encode_texts(model, PROMPTS) | subject.encode_required_inputs(model)
    sigma_B = torch.tensor(case.sigmas[0])
    with torch.no_grad():
        plain = model.denoise(latents, sigma_B, conditioning)
        quantise_base(model.unwrapped_denoiser, model.block_classes, "fp8", BF16, CPU)
        found = model.denoise(latents, sigma_B, conditioning)
        alone = model.denoise(latents[:1], sigma_B[:1], {name: rows[:1] for name, rows in conditioning.items()})
    assert 0 < relative_error(found, plain) < 0.08
    assert torch.equal(alone, found[:1])


@check_each(("family", "num_layers", "num_inputs"), [("sd3", 16, 10), ("wan21", 10, 7)])
def test_layers_with_one_input_quantise_it_once(family, num_layers, num_inputs, tiny_pipelines, monkeypatch):
    """q, k and v of self-attention share an input, and so do k and v of cross-attention. SD3.5 has three groups."""
    case = CASES[family]
    subject = FamilyUnderTest(tiny_pipelines(family), case)
    model = subject.load_model(FP32)
    latents = torch.randn(2, *model.latent_shape(*case.size), generator=torch.Generator().manual_seed(0))
    arguments = latents, torch.tensor(case.sigmas[0]), subject.encode_texts(model, PROMPTS)
    quantise_base(model.unwrapped_denoiser, model.block_classes, "fp8", FP32, CPU)
    block = next(part for part in model.denoiser.modules() if isinstance(part, model.block_classes))
    calls, layer_calls, blocks = [], [], []

    def count(x, **options):
        calls.append(x.shape)
        return quantise_rows(x, **options)

    monkeypatch.setattr(fp8_linear, "quantise_rows", count)
    block.register_forward_pre_hook(lambda *_: blocks.append((len(calls), len(layer_calls))))
    block.register_forward_hook(lambda *_: blocks.append((len(calls), len(layer_calls))))
    for part in base(block).values():
        part.register_forward_hook(lambda *_: layer_calls.append(1))
    with torch.no_grad():
        shared = model.denoise(*arguments)
    before, after = blocks
    assert (after[0] - before[0], after[1] - before[1]) == (num_inputs, num_layers)
    assert last_input.entry is None, "the rows are released with their input"
    monkeypatch.setattr(fp8_linear, "quantise_input", quantise_rows)
    with torch.no_grad():
        assert torch.equal(model.denoise(*arguments), shared)


def test_a_changed_input_is_quantised_again():
    _, quantised = layer(64, 48)
    x = torch.randn(3, 64)
    first = quantised(x)
    assert torch.equal(quantised(x), first)
    x.mul_(2)
    assert torch.equal(quantised(x), quantised(x.clone()))
    assert not torch.equal(quantised(x), first)
    with torch.inference_mode():  # its tensors do not count their changes
        y = torch.randn(3, 64)
        first = quantised(y)
        y.mul_(2)
        assert not torch.equal(quantised(y), first)


def test_a_capture_does_not_reuse_rows_from_before_the_capture(monkeypatch):
    """A replay would not update these rows."""
    calls = []
    monkeypatch.setattr(fp8_linear, "quantise_rows", lambda x: calls.append(1) or (x, x))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    is_capturing = [False, True, True, False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing.pop(0))
    x = torch.randn(3, 64)
    counts = []
    while is_capturing:
        fp8_linear.quantise_input(x)
        counts.append(len(calls))
    assert counts == [1, 2, 2, 3]


@check_each(("name", "fast"), [("sd3_nft", True), ("sd3_flow_grpo", False)])
def test_only_rollouts_without_log_probabilities_accumulate_fast(name, fast, root):
    _, quantised = layer(64, 48)
    recipe = load_recipe(root / "tests" / "recipes" / f"{name}.yaml", ["model.base_precision=fp8", "lora={rank: 4}"])
    job = SimpleNamespace(engine=ContextEngine(quantised), recipe=recipe)
    source = ColocatedSource(job, groups=None, rewards=None, algorithm=SimpleNamespace(rollout_policy="old"))
    with source.rollout_policy():
        assert quantised.fast_accumulation == fast
    assert not quantised.fast_accumulation, "reference and training predictions accumulate in float32"


class ContextEngine:
    """An engine whose contexts do nothing."""

    def __init__(self, module):
        self.module = module

    def use_policy(self, name, *, merge):
        return contextlib.nullcontext()

    replay_graphs = contextlib.nullcontext


def test_the_accumulation_reaches_the_product_on_a_gpu(monkeypatch):
    found = []

    def multiply(a, b, **options):
        found.append(options["use_fast_accum"])
        return torch.empty(len(a), b.shape[1], dtype=options["out_dtype"], device="meta")

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    _, quantised = layer(64, 48, BF16)
    rows = [factor.to("meta") for factor in (*_quantised(torch.randn(3, 64)), *_quantised(torch.randn(48, 64)))]
    for fast in (False, True):
        assert fp8_matmul(*rows, None, BF16, fast=fast).shape == (3, 48)
    assert found == [False, True]
    monkeypatch.setattr(fp8_linear, "fp8_matmul", lambda *args, fast: found.append(fast) or torch.zeros(3, 48))
    for fast in (False, True):
        fp8_linear.set_fast_accumulation(quantised, fast)
        quantised(torch.randn(3, 64, dtype=BF16))
    assert found[2:] == [False, True]


def test_a_worker_quantizes_weights_without_loading_the_whole_base(tiny_pipelines):
    """A rollout worker loads a mapped model like this: it quantizes and casts each weight directly from the file."""
    model = registry.load_model(tiny_pipelines("sd3"), dtype=BF16, device="cpu", mapped=True)
    denoiser = model.denoiser
    largest = max(p.numel() for p in denoiser.parameters())
    with LiveByteCounter("cpu") as live:
        quantise_base(denoiser, model.block_classes, "fp8", BF16, CPU)
        move_weights(denoiser, BF16, CPU)
    assert base(denoiser)
    assert {p.dtype for p in denoiser.parameters()} == {BF16}
    # One weight and its float32 rows during quantization.
    assert live.peak < live.current + 16 * largest
    kept = sum(tensor.nbytes for tensor in (*denoiser.parameters(), *denoiser.buffers()))
    assert live.current <= kept


def base(module):
    return {name: part for name, part in module.named_modules() if isinstance(part, Fp8Linear)}


def test_the_layers_of_blocks_are_quantised_but_for_modulation():
    module = small_sd3()
    block = type(module.transformer_blocks[0])
    count = quantise_base(module, (block,), "fp8", FP32, CPU)
    names = base(module)
    assert {"transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.net.0.proj"} <= names.keys()
    assert not [n for n in names if "norm" in n or not n.startswith("transformer_blocks.")]
    assert count == sum(m.in_features * m.out_features for m in names.values())
    left = [n for n, m in module.named_modules() if type(m) is nn.Linear and n.startswith("transformer_blocks.")]
    assert left
    assert all("norm" in n for n in left)


def test_a_denoiser_without_such_layers_and_a_gpu_without_float8_are_refused(monkeypatch):
    with pytest.raises(RecipeError, match="base_precision: fp8: the denoiser's blocks have no linear layer"):
        quantise_base(nn.Sequential(nn.Linear(32, 32)), (nn.Conv2d,), "fp8", FP32, CPU)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(RecipeError, match=r"capability 8\.9 or newer; A100 is older"):
        require_fp8("model.base_precision: fp8", BF16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RecipeError, match=r"set model\.dtype: bfloat16"):
        require_fp8("model.base_precision: fp8", FP32, gpu)
