"""Floating-point operations of one sample through a denoiser, counted operator by operator on the meta device.

2 per multiply-add of linear layers, attention and convolutions; pointwise work does not count. Nothing is computed and
no memory is taken, so the counts of a 14-billion-parameter model take seconds on a laptop.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from wfm_ds.models.base import DiffusionModel
from wfm_ds.training.forwards import Forwards


@dataclass(frozen=True, slots=True)
class Flops:
    """Of one sample."""

    forward: int
    backward: int  # to everything that trains; what is frozen passes gradients on and gets none
    recompute: int  # forwards repeated in the backward pass, if blocks are checkpointed
    forward_without_adapters: int  # equals forward where there are none


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """FLOPs of some forwards."""

    forward: int
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute


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
    """Each of the two gradients costs what the forward did. Torch's own formula forgets the groups in the weights'."""
    return conv_flop_count(x_shape, w_shape, grad_out_shape, transposed) * sum(output_mask[:2])


def counting() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward})


def count_flops(
    model: DiffusionModel,
    latent_shape: Sequence[int],
    conditioning: Mapping[str, Tensor],
    *,
    checkpointing: bool = False,
) -> Flops:
    """Of the model's denoiser as it stands: its adapters compute, and what requires gradients gets them.

    latent_shape: of one sample, without batch; conditioning: of one sample, [1, ...] each, of which shapes and dtypes
    count; checkpointing: recompute block activations in the backward pass.
    """
    shadow = copy.copy(model)
    shadow.denoiser = on_meta(model.bare_denoiser)
    latents, sigma = torch.empty(1, *latent_shape, device="meta"), torch.empty(1, device="meta")
    inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in conditioning.items()}

    def differentiated() -> tuple[int, int]:
        with counting() as counter:
            velocity = shadow.denoise(latents, sigma, inputs, 0)  # experts are all alike
            forward = counter.get_total_flops()
            torch.autograd.backward(velocity.sum())
        return forward, counter.get_total_flops() - forward

    forward, backward = differentiated()
    recompute = 0
    if checkpointing:
        denoiser: Any = shadow.denoiser
        denoiser.enable_gradient_checkpointing()
        recompute = differentiated()[1] - backward
    for part in shadow.denoiser.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(False)
    with counting() as counter, torch.no_grad():
        shadow.denoise(latents, sigma, inputs, 0)
    return Flops(forward, backward, recompute, counter.get_total_flops())


def on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have shapes and no values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def work_of(forwards: Mapping[str, Forwards], flops: Flops) -> dict[str, ForwardWork]:
    """FLOPs by purpose. Only `policy` is differentiated."""
    work = {}
    for purpose, f in forwards.items():
        with_adapters = f.samples - f.without_adapters
        forward = with_adapters * flops.forward + f.without_adapters * flops.forward_without_adapters
        trained = f.samples if purpose == "policy" else 0
        work[purpose] = ForwardWork(forward, trained * flops.backward, trained * flops.recompute)
    return work
