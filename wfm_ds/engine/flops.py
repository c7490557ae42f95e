"""FLOPs of a module, counted per operator on the meta device.

Linear layers, attention and convolutions count 2 FLOPs per multiply-add; pointwise operations are not counted. Nothing
is computed or allocated, so counting a model of 14 billion parameters takes seconds on a laptop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one forward pass of a denoiser and of its backward pass."""

    forward: int
    backward: int  # with respect to everything that trains; frozen weights pass gradients through but receive none
    recompute: int  # forward passes repeated in the backward pass, if blocks are checkpointed
    forward_without_adapters: int  # equals `forward` if there are no adapters


def convolution_backward_flops(
    grad_out_shape: list[int],
    x_shape: list[int],
    w_shape: list[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Return the FLOPs of a convolution's backward pass. torch's own formula ignores groups in the weight gradient."""
    return conv_flop_count(x_shape, w_shape, grad_out_shape, transposed) * sum(output_mask[:2])


def make_flop_counter() -> FlopCounterMode:
    """Return a context manager that counts FLOPs, with a corrected formula for convolutions."""
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward_flops}
    )


def measure_flops(denoiser: nn.Module, predict: Callable[[], Tensor], *, checkpointing: bool) -> Flops:
    """Count the FLOPs of `predict`, a forward pass of `denoiser` on the meta device, and of its backward pass."""

    def count_passes() -> tuple[int, int]:
        with make_flop_counter() as counter:
            prediction = predict()
            forward = counter.get_total_flops()
            torch.autograd.backward(prediction.sum())
        return forward, counter.get_total_flops() - forward

    module: Any = denoiser
    forward, backward = count_passes()
    recompute = 0
    if checkpointing:
        module.enable_gradient_checkpointing()
        recompute = count_passes()[1] - backward
        module.disable_gradient_checkpointing()
    return Flops(forward, backward, recompute, count_without_adapters(denoiser, predict) or forward)


def count_without_adapters(denoiser: nn.Module, predict: Callable[[], Tensor]) -> int | None:
    """Return the FLOPs of `predict` with adapters disabled; None if the denoiser has no adapters."""
    adapters = find_adapter_layers(denoiser)
    if not adapters:
        return None
    for part in adapters:
        part.enable_adapters(False)
    with make_flop_counter() as counter, torch.no_grad():
        predict()
    for part in adapters:
        part.enable_adapters(True)
    return int(counter.get_total_flops())


def find_adapter_layers(denoiser: nn.Module) -> list[Any]:
    """Return the layers that have LoRA adapters, in the order of denoiser.modules()."""
    return [part for part in denoiser.modules() if isinstance(part, BaseTunerLayer)]


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy of the module on the meta device: parameters and buffers have shapes but no values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)
