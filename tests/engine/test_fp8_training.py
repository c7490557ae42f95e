"""Full training with float8 products: unchanged parameters, small errors, and bitwise equalities."""

import importlib.util
import sys

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

import transformer_engine_double
from kernel_cases import relative_error
from multi_rank.training import inputs, small_sd3
from wfm_ds.engine import fp8_training, optional_packages
from wfm_ds.engine.fp8_training import te_layer_factory, train_in_float8
from wfm_ds.errors import RecipeError

pytestmark = pytest.mark.slow

BY_LIBRARY = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
KEY = "model.fp8_training: transformer_engine"


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


@BY_LIBRARY
def test_replacing_layers_keeps_the_parameters():
    _, module = pair()
    before = dict(module.named_parameters())
    names = list(module.state_dict())
    # modulation and layers of unsuitable size stay unchanged
    assert train_in_float8(module, (Block,), "torchao", BF16, CPU) == 1
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
        assert relative_error(found, wanted) < most
    assert relative_error(results["float8"][0], results["plain"][0]) > 0.01
    with torch.no_grad():
        assert torch.equal(module(x), results["float8"][0])  # a forward changes no state
        assert all(torch.equal(module(x[i : i + 1])[0], results["float8"][0][i]) for i in range(len(x)))


@BY_LIBRARY
def test_everything_of_a_denoiser_trains():
    module = small_sd3().to(BF16)
    assert train_in_float8(module, (type(module.transformer_blocks[0]),), "torchao", BF16, CPU) > 10
    module(**inputs(range(2), BF16), return_dict=False)[0].float().square().mean().backward()
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_fp8_training_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(optional_packages, "find_spec", lambda package: None)
    with pytest.raises(RecipeError, match="needs the package torchao"):
        train_in_float8(nn.Sequential(Block()), (Block,), "torchao", BF16, CPU)


@pytest.fixture
def library(monkeypatch):
    transformer_engine_double.install(monkeypatch)
    monkeypatch.setattr(fp8_training, "require_package", lambda package, key: None)


def converted(module):
    count = train_in_float8(module, (type(module.transformer_blocks[0]),), "transformer_engine", BF16, GPU)
    assert count > 10
    return module


def test_names_shapes_and_parameters_are_those_of_the_plain_denoiser(library):
    module = small_sd3().to(BF16)
    before, shapes = dict(module.named_parameters()), {n: t.shape for n, t in module.state_dict().items()}
    order, buffers = list(before), [name for name, _ in module.named_buffers()]
    converted(module)
    block = module.transformer_blocks[0]
    assert isinstance(block.attn.to_q, transformer_engine_double.Linear)
    assert type(block.norm1.linear) is nn.Linear
    assert [name for name, _ in module.named_parameters()] == order
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    module(**inputs(range(2), BF16), return_dict=False)  # after a forward, the library's own layers have state
    assert {n: t.shape for n, t in module.state_dict().items()} == shapes
    assert [name for name, _ in module.named_buffers()] == buffers


def test_the_double_adds_state_to_checkpoints_like_the_library(library):
    plain = transformer_engine_double.Linear(16, 16, params_dtype=BF16, device="cpu")
    assert list(plain.state_dict()) == ["weight", "bias", "_extra_state"]


def test_weights_go_to_a_plain_denoiser_and_back(library, tmp_path):
    module = converted(small_sd3().to(BF16))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    module.save_pretrained(tmp_path)
    plain = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=BF16)
    saved, loaded = module.state_dict(), plain.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    other = converted(small_sd3().to(BF16))
    other.load_state_dict(loaded, strict=True)
    call = inputs(range(2), BF16)
    with torch.no_grad():
        assert torch.equal(other(**call, return_dict=False)[0], module(**call, return_dict=False)[0])


@pytest.mark.parametrize("shape", [(3, 5, 32), (7, 32), (16, 32), (2, 3, 4, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows_has_correct_shape_and_gradients(shape, bias, library):
    """The library needs multiples of 8 rows; the layer pads with zero rows, which add nothing to the gradients."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=bias).to(BF16)
    made = te_layer_factory(KEY, GPU)(layer)
    assert (made.bias is None) is not bias
    x = torch.randn(shape, dtype=BF16, requires_grad=True)
    found, wanted = made(x), layer(x)
    assert found.shape == wanted.shape
    assert 0 < (found - wanted).float().norm() < 0.06 * wanted.float().norm()
    upstream = torch.randn_like(wanted)
    for got, want in zip(
        torch.autograd.grad(found, [x, *made.parameters()], upstream),
        torch.autograd.grad(wanted, [x, *layer.parameters()], upstream),
        strict=True,
    ):
        assert got.shape == want.shape
        assert (got - want).float().norm() < 0.06 * want.float().norm()


def test_everything_of_a_denoiser_trains_with_recomputed_blocks_too(library):
    gradients = []
    for checkpointing in (False, True):
        module = converted(small_sd3().to(BF16))
        if checkpointing:
            module.enable_gradient_checkpointing()
        module.train()
        module(**inputs(range(3), BF16), return_dict=False)[0].float().square().mean().backward()
        assert [n for n, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
        gradients.append({n: p.grad for n, p in module.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_a_cpu_and_a_package_that_cannot_be_imported_are_refused(monkeypatch):
    with pytest.raises(RecipeError, match=r"transformer_engine needs a GPU, but the device is cpu: use torchao"):
        te_layer_factory(KEY, CPU)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(RecipeError, match=r"the package transformer_engine cannot be imported: "):
        te_layer_factory(KEY, GPU)
