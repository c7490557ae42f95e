"""Attention kernels: which one is chosen, why another one is not available, and that each attention layer uses it.

The kernels need a GPU. These tests replace one of them in diffusers' table by torch's attention with a call counter.
"""

import contextlib
import copy
import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.utils._python_dispatch import TorchDispatchMode

from each_case import check_each
from multi_rank.sharing import CASES, built, forwards, run
from wfm_ds.engine import attention_kernels
from wfm_ds.engine.attention_kernels import (
    KERNELS,
    attention_layers,
    choose_kernel,
    current_kernel,
    find_obstacle,
    use_kernel,
)
from wfm_ds.errors import UserError
from wfm_ds.models import registry

SERVED = ("sd3", "wan", "wan, image embeddings", "cosmos25")
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def counted(monkeypatch):
    """Return the list of calls of the cuDNN kernel, which torch's attention replaces here."""
    calls = []
    table = _AttentionBackendRegistry._backends

    def count(**arguments):
        calls.append(tuple(arguments["query"].shape))
        return table[AttentionBackendName.NATIVE](**arguments)

    monkeypatch.setitem(table, KERNELS["cudnn"].backend, count)
    return calls


@pytest.fixture
def gpu(monkeypatch):
    """`gpu((9, 0))`: pretend that CUDA devices have this compute capability."""

    def of(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return CUDA

    return of


def with_heads_of(family, size):
    """Return a transformer of a family on the meta device, with attention heads of this size."""
    options = {"attention_head_dim": size}
    with torch.device("meta"):
        if family == "cosmos25":
            return CASES[family].build(2, **options)
        config = {**built(CASES[family], heads=2).config, **options}
        return type(built(CASES[family], heads=2)).from_config(config)


@pytest.mark.parametrize("name", SERVED)
def test_every_attention_call_reaches_the_chosen_kernel(name, counted):
    case = CASES[name]
    plain = built(case)
    chosen = copy.deepcopy(plain)
    use_kernel(chosen, "cudnn")
    assert current_kernel(chosen) == "cudnn"
    with CallsOfTorch() as torchs:
        outputs, gradients = run(chosen, case, [case.even])
    assert len(counted) == torchs.count >= len(list(attention_layers(chosen)))
    want, want_gradients = run(plain, case, [case.even])
    assert torch.allclose(outputs[0], want[0], rtol=0, atol=1e-6)
    assert gradients.keys() == want_gradients.keys()
    assert all(torch.allclose(gradients[n], want_gradients[n], rtol=1e-4, atol=1e-4) for n in gradients)


def test_flash3_trains_with_the_gradient_of_its_package(monkeypatch):
    """The package needs a Hopper GPU. Its function is replaced by torch's attention in its layout."""
    case, calls = CASES["wan"], []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        calls.append(q.shape)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=causal)
        return (out.transpose(1, 2), None) if len(calls) % 2 else out.transpose(1, 2)  # both kinds of results

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    backend = KERNELS["flash3"].backend
    monkeypatch.setitem(_AttentionBackendRegistry._backends, backend, _AttentionBackendRegistry._backends[backend])
    plain = built(case)
    chosen = copy.deepcopy(plain)
    use_kernel(chosen, "flash3", trains=True)
    outputs, gradients = run(chosen, case, [case.even])
    assert len(calls) >= len(list(attention_layers(chosen)))
    want, want_gradients = run(plain, case, [case.even])
    assert torch.allclose(outputs[0], want[0], rtol=0, atol=1e-6)
    assert all(torch.allclose(gradients[n], want_gradients[n], rtol=1e-4, atol=1e-4) for n in want_gradients)


class CallsOfTorch(torch.overrides.TorchFunctionMode):
    """Count the calls of torch's attention."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.nn.functional.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def test_both_kinds_of_blocks_of_flux2_reach_the_chosen_kernel(counted, tiny_pipelines):
    model = registry.load_model(tiny_pipelines("flux2"), dtype=torch.float32, device="cpu")
    arguments = torch.randn(1, *model.latent_shape(32, 32)), torch.ones(1), model.encode_text(["a cat"])
    with torch.no_grad():
        want = model.denoise(*arguments)
        use_kernel(model.denoiser, "cudnn")
        torch.testing.assert_close(model.denoise(*arguments), want, rtol=0, atol=1e-6)
    assert len(counted) == len(list(attention_layers(model.denoiser))) == 2


@check_each("family", ["qwen_image", "z_image", "sana_wm", "ltx2"])
def test_masked_text_attention_is_unchanged(family, tiny_pipelines, gpu):
    transformer = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu").denoiser
    assert choose_kernel("auto", transformer, BF16, gpu(HOPPER), trains=True) == "native"
    with pytest.raises(UserError, match="does not support masks"):
        choose_kernel("cudnn", transformer, BF16, CUDA, trains=True)


@check_each("name", SERVED)
def test_native_changes_no_processor(name):
    transformer = built(CASES[name])
    before = [layer.processor for _, layer in attention_layers(transformer)]
    use_kernel(transformer, choose_kernel("native", transformer, BF16, CPU, trains=True))
    assert [layer.processor for _, layer in attention_layers(transformer)] == before
    assert current_kernel(transformer) == "native"


@pytest.mark.parametrize("name", SERVED)
def test_auto_copies_no_queries_keys_or_values(name, gpu, monkeypatch):
    """On Hopper, torch's own choice is cuDNN. diffusers' wrapper of cuDNN first copies its three inputs. Cosmos's own
    processor has a copy that is not needed."""
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda _: contextlib.nullcontext())
    case, num_copies = CASES[name], {}
    for kernel in ("native", "cudnn", "auto"):
        transformer = built(case)
        use_kernel(transformer, choose_kernel(kernel, with_heads_of(name, 64), BF16, gpu(HOPPER), trains=True))
        with CallsOfTorch() as torchs, torch.no_grad(), Copies() as copies:
            forwards(transformer, case, [case.even])
        num_copies[kernel] = copies.count
    assert num_copies["cudnn"] >= num_copies["native"] + (2 if name == "cosmos25" else 3) * torchs.count
    assert num_copies["auto"] == num_copies["native"]


class Copies(TorchDispatchMode):
    """Count the copies of tensors to a contiguous layout."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.clone.default
        return function(*args, **(kwargs or {}))


@check_each("family", ["sana", "sana_video"])
@check_each("name", sorted(KERNELS))
def test_sana_keeps_its_own_attention(family, name, gpu):
    transformer = built(CASES[family])
    assert choose_kernel("auto", transformer, BF16, gpu(HOPPER), trains=True) == "native"
    with pytest.raises(UserError, match=rf"model\.attention: {name} .*attn\d.*set it to auto or native"):
        choose_kernel(name, transformer, BF16, CUDA, trains=False)


def test_video_text_of_sana_is_refused_for_its_mask():
    transformer = built(CASES["sana_video"])
    for block in transformer.transformer_blocks:
        block.attn1 = torch.nn.Identity()
    with pytest.raises(UserError, match="does not support masks"):
        choose_kernel("cudnn", transformer, BF16, CPU, trains=False)


@check_each(
    ("name", "trains", "dtype", "capability", "words"),
    [
        ("cudnn", True, torch.float32, HOPPER, r"does not support float32: set model\.dtype: bfloat16"),
        (
            *("cudnn", True, BF16, None),
            "needs a CUDA GPU of compute capability 8.0 or newer.*this device is not a CUDA GPU",
        ),
        ("cudnn", True, BF16, (7, 5), "this one has 7.5"),
        ("flash", True, BF16, HOPPER, r"not installed: install flash-attn 2\.6\.3 or newer \(pip install flash-attn"),
        ("flash3", True, BF16, HOPPER, "not installed: install FlashAttention-3"),
        ("flash3", False, BF16, HOPPER, "not installed: install FlashAttention-3"),
        ("sage", True, BF16, HOPPER, "no backward pass"),
        ("sage", False, BF16, HOPPER, r"not installed: install sageattention 2\.1\.1"),
    ],
)
def test_an_unusable_kernel_is_refused_with_the_alternative(name, trains, dtype, capability, words, gpu):
    device = CPU if capability is None else gpu(capability)
    with pytest.raises(UserError, match=rf"^model\.attention: {name} .*{words}.*, or set it to auto or native$"):
        choose_kernel(name, with_heads_of("wan", 64), dtype, device, trains=trains)


def test_heads_that_a_kernel_does_not_take_are_refused():
    wan = with_heads_of("wan", 160)
    with pytest.raises(UserError, match=r"heads of 8 to 128 channels in steps of 8, and blocks\.0\.attn1 has 160"):
        choose_kernel("cudnn", wan, BF16, CPU, trains=True)
    assert "heads of 64 to 128" in find_obstacle("sage", wan, BF16, HOPPER, trains=False)


def test_an_installed_package_is_used(monkeypatch):
    """`is_installed` is the only function that looks for flash-attn."""
    monkeypatch.setattr(attention_kernels, "is_installed", lambda backend: True)
    wan = with_heads_of("wan", 64)
    assert find_obstacle("flash", wan, BF16, AMPERE, trains=True) is None
    assert find_obstacle("flash3", wan, BF16, HOPPER, trains=False) is None
    assert "9.0 or newer, below 10.0" in find_obstacle("flash3", wan, BF16, BLACKWELL, trains=False)


def test_deterministic_algorithms_allow_native(gpu):
    wan = with_heads_of("wan", 64)
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_kernel("auto", wan, BF16, gpu(HOPPER), trains=True) == "native"
        with pytest.raises(UserError, match=r"which engine\.deterministic requires"):
            choose_kernel("cudnn", wan, BF16, CUDA, trains=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_packages_of_different_kernels_are_not_confused():
    packages = [kernel.package for kernel in KERNELS.values() if kernel.package]
    assert len(set(packages)) == len(packages)
    assert {dataclasses.replace(kernel).backend.value for kernel in KERNELS.values()} == {
        *("_native_cudnn", "flash", "_flash_3", "sage")
    }


def test_a_layer_that_computes_its_attention_itself_is_named():
    class Own:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return hidden_states

    wan = built(CASES["wan"])
    wan.blocks[0].attn1.processor = Own()
    own = r"does not support blocks\.0\.attn1, which computes its attention itself: choose another"
    with pytest.raises(UserError, match=own):
        choose_kernel("cudnn", wan, BF16, CPU, trains=True)
    wan.blocks[0].attn1.processor = wan.blocks[0].attn2.processor
    del wan.blocks[0].attn1.inner_dim
    with pytest.raises(UserError, match=r"blocks\.0\.attn1, which does not define the size of its heads"):
        choose_kernel("cudnn", wan, BF16, CPU, trains=True)
    with pytest.raises(UserError, match="the denoiser has none: choose"):
        choose_kernel("cudnn", torch.nn.Linear(2, 2), BF16, CPU, trains=True)
