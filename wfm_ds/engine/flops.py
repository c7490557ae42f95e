"""Floating-point operations of a module, counted operator by operator on the meta device.

2 per multiply-add of linear layers, attention and convolutions; pointwise work does not count. Nothing is computed and
no memory is taken, so the counts of a 14-billion-parameter model take seconds on a laptop.
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
    """Costs of one forward of a denoiser and of its backward pass."""

    forward: int
    backward: int  # to everything that trains; what is frozen passes gradients on and gets none
    recompute: int  # forwards repeated in the backward pass, if blocks are checkpointed
    forward_without_adapters: int  # equals forward where there are none


def convolution_backward(
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
    """FLOPs of a backward: each of the two gradients costs as much as the forward. Torch's own
    formula forgets the groups in that of the weights."""
    return conv_flop_count(x_shape, w_shape, grad_out_shape, transposed) * sum(output_mask[:2])


def counting() -> FlopCounterMode:
    """A context that counts; its own formula replaces one of torch's."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward})


def flops_of(denoiser: nn.Module, predict: Callable[[], Tensor], *, checkpointing: bool) -> Flops:
    """Count `predict`, a forward of `denoiser` on the meta device, as the denoiser stands: its adapters compute, and
    what requires gradients gets them. checkpointing: recompute block activations in the backward pass."""

    def differentiated() -> tuple[int, int]:
        with counting() as counter:
            prediction = predict()
            forward = counter.get_total_flops()
            torch.autograd.backward(prediction.sum())
        return forward, counter.get_total_flops() - forward

    module: Any = denoiser
    forward, backward = differentiated()
    recompute = 0
    if checkpointing:
        module.enable_gradient_checkpointing()
        recompute = differentiated()[1] - backward
        module.disable_gradient_checkpointing()
    return Flops(forward, backward, recompute, without_adapters(denoiser, predict) or forward)


def without_adapters(denoiser: nn.Module, predict: Callable[[], Tensor]) -> int | None:
    """FLOPs of `predict` while the adapters of `denoiser` are off; None if it has none."""
    adapters = adapted_layers(denoiser)
    if not adapters:
        return None
    for part in adapters:
        part.enable_adapters(False)
    with counting() as counter, torch.no_grad():
        predict()
    for part in adapters:
        part.enable_adapters(True)
    return int(counter.get_total_flops())


def adapted_layers(denoiser: nn.Module) -> list[Any]:
    """The layers that have adapters, in their order."""
    return [part for part in denoiser.modules() if isinstance(part, BaseTunerLayer)]


def on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)
