"""A test double of TransformerEngine, which cannot be imported without CUDA.

It copies the interface of Linear that replacing layers depends on: constructor, registered parameters, state dict,
errors and results. The sources are versions 2.9 to 2.18 of transformer_engine/pytorch/module/linear.py, module/base.py
and pytorch/quantization.py.

The forward pass rounds to e4m3 with one scale per tensor; the backward pass does not round. No kernel of the library
runs.
"""

import math
import pickle
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

E4M3_MAX = 448.0
ENABLED = []


class Float8CurrentScaling:
    pass


@contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
    ENABLED.append(recipe if enabled else None)
    try:
        yield
    finally:
        ENABLED.pop()


class Linear(nn.Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        **others,
    ):
        super().__init__()
        if not torch.cuda.is_available():
            raise RuntimeError("TransformerEngine needs CUDA.")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fp8_meta = {"fp8_checkpoint": False}
        self.param_init_meta = {}
        options = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        self.register_parameter("weight", weight, init_fn=init_method, fp8_meta_index=1)
        if bias:
            self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **options)), init_fn=None)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)
        if device != "meta":  # initialization is deferred on the meta device
            nn.init.normal_(self.weight, 0.0, 0.023)

    def register_parameter(self, name, param, **kwargs):
        super().register_parameter(name, param)
        if name not in self.param_init_meta:
            self.param_init_meta[name] = kwargs

    def get_extra_state(self):
        if not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.fp8_meta)), dtype=torch.uint8)

    def set_extra_state(self, state):
        if state is not None and state.numel():
            self.fp8_meta.update(pickle.loads(state.numpy().tobytes()))  # noqa: S301

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        if inp.dtype != self.weight.dtype:
            raise AssertionError("Data types for parameters must match when outside of autocasted region.")
        recipe = ENABLED[-1] if ENABLED else None
        self.fp8_meta["fp8_checkpoint"] = recipe is not None
        bias = self.bias if self.use_bias else None
        if recipe is None:
            return nn.functional.linear(inp, self.weight, bias)
        for tensor in (inp, self.weight):
            if math.prod(tensor.shape[:-1]) % 8 != 0 or tensor.shape[-1] % 16 != 0:
                raise ValueError("FP8 execution requires the product of all dimensions except the last to be divisible")
        product = nn.functional.linear(rounded(inp), rounded(self.weight), bias)
        return product.view(-1, *inp.shape[1:-1], self.out_features)


def rounded(tensor):
    scale = tensor.detach().abs().max().clamp(min=1e-12) / E4M3_MAX
    values = (tensor.detach() / scale).to(torch.float8_e4m3fn).to(tensor.dtype) * scale
    return tensor + (values - tensor).detach()


def install(monkeypatch):
    """Make `import transformer_engine.pytorch` load the double, and report a GPU with float8 support."""
    package, pytorch, common, recipe = (
        ModuleType(f"transformer_engine{name}") for name in ("", ".pytorch", ".common", ".common.recipe")
    )
    pytorch.Linear, pytorch.autocast = Linear, autocast
    recipe.Float8CurrentScaling = Float8CurrentScaling
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    for module in (package, pytorch, common, recipe):
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
