"""Count the FLOPs of the denoiser's forward and backward passes on the meta device.

A multiply-add in a linear layer, attention or a convolution counts as 2 FLOPs. Pointwise operations are not counted.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from wfm_ds.engine.adapter_layers import find_adapter_layers
from wfm_ds.engine.checkpointing import enable_checkpointing
from wfm_ds.engine.live_bytes import emulate_gpu_attention
from wfm_ds.engine.policies import add_adapters, set_trainable
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.shared_defaults import Checkpointing

log = logging.getLogger(__name__)

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one forward pass of a denoiser and of its backward pass."""

    forward: int
    backward: int  # gradients of trained weights and of activations; frozen weights need no gradient of their own
    recompute: int  # forward passes repeated in the backward pass, if blocks are checkpointed
    forward_without_adapters: int  # equals `forward` if there are no adapters


def convolution_backward_flops(
    grad_out_shape: list[int], x_shape: list[int], w_shape: list[int], *arguments: Any, **_: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass. torch's own formula is wrong for grouped convolutions.

    Takes the arguments of aten::convolution_backward, with shapes instead of tensors.
    """
    _bias, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = arguments
    return conv_flop_count(x_shape, w_shape, grad_out_shape, transposed) * int(sum(output_mask[:2]))


def make_flop_counter() -> FlopCounterMode:
    """Return a context manager that counts FLOPs. It corrects torch's formula for convolutions."""
    return FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward_flops}
    )


def measure_flops(denoiser: nn.Module, predict: Callable[[], Tensor], *, checkpointing: Checkpointing) -> Flops:
    """Count the FLOPs of the forward pass `predict` of `denoiser`, on the meta device, and of its backward pass.

    checkpointing: value of model.gradient_checkpointing.
    """

    def count_passes() -> tuple[int, int]:
        with make_flop_counter() as counter:
            prediction = predict()
            forward = counter.get_total_flops()
            torch.autograd.backward(prediction.sum())
        return forward, counter.get_total_flops() - forward

    forward, backward = count_passes()
    recompute = 0
    if checkpointing:
        # `attention` keeps outputs of fused attention, which the meta device does not have without emulation.
        with emulate_gpu_attention() if checkpointing == "attention" else contextlib.nullcontext():
            without = count_passes()[1] if checkpointing == "attention" else backward
            enable_checkpointing(denoiser, checkpointing)
            recompute = count_passes()[1] - without
        cast(Any, denoiser).disable_gradient_checkpointing()
    without_adapters = forward
    if adapters := find_adapter_layers(denoiser):
        for part in adapters:
            part.enable_adapters(False)
        with make_flop_counter() as counter, torch.no_grad():
            predict()
        for part in adapters:
            part.enable_adapters(True)
        without_adapters = counter.get_total_flops()
    return Flops(forward, backward, recompute, without_adapters)


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy of the module on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Total FLOPs of several forward passes and of their backward passes."""

    required: int = 0  # without gradient checkpointing
    recomputed: int = 0  # additional FLOPs of gradient checkpointing

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.required + other.required, self.recomputed + other.recomputed)


class FlopCounter:
    """Records the forward passes of one rank and returns their total FLOPs (`pop_count`)."""

    def __init__(self, meta_denoiser: nn.Module, *, checkpointing: Checkpointing) -> None:
        """meta_denoiser: copy of the denoiser on the meta device, with the adapters and requires_grad flags of the
        original.
        """
        self._meta_denoiser, self._checkpointing = meta_denoiser, checkpointing
        # {(shapes, with_gradient, with_adapters): number of samples}
        self._samples: Counter[tuple[Hashable, bool, bool]] = Counter()
        self._examples: dict[Hashable, Arguments] = {}
        self._flops: dict[Hashable, Flops] = {}
        self._warned = False

    @classmethod
    def from_denoiser(
        cls, denoiser: nn.Module, recipe: Recipe, targets: list[str], frozen: AbstractSet[str] = frozenset()
    ) -> FlopCounter:
        """Create a counter for a denoiser that has no adapters yet and is not partitioned.

        targets: names of the layers to adapt. frozen: names of parameters that full training does not train.
        """
        shadow = copy_to_meta(denoiser)
        make_trainable(shadow, recipe, targets, [], frozen)
        return cls(shadow, checkpointing=recipe.model.gradient_checkpointing)

    def record_forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_gradient: bool, with_adapters: bool
    ) -> None:
        """Record a forward pass with these arguments. Tensors and lists must have one row or item per sample.

        with_adapters: False if adapters are disabled.
        """
        batch = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shapes = (
            tuple(map(_argument_shape, args)),
            tuple(zip(kwargs, map(_argument_shape, kwargs.values()), strict=True)),
        )
        self._samples[shapes, with_gradient, with_adapters] += batch
        if shapes not in self._examples:
            self._examples[shapes] = (
                tuple(map(_single_sample, args)),
                {name: _single_sample(v) for name, v in kwargs.items()},
            )

    def pop_count(self) -> FlopCount | None:
        """Return the FLOPs of the forward passes recorded since the last call, and of their backward passes.

        Returns None if the denoiser reads values of tensors, because meta tensors have no values.
        """
        try:
            return sum((self._count_forwards(*kind, samples) for kind, samples in self._samples.items()), FlopCount())
        except RuntimeError as error:
            if not self._warned:
                log.warning("cannot count the FLOPs of this denoiser, so TFLOP/s are not reported: %s", error)
            self._warned = True
            return None
        finally:
            self.discard()

    def discard(self) -> None:
        self._samples.clear()

    def _count_forwards(self, shapes: Hashable, with_gradient: bool, with_adapters: bool, samples: int) -> FlopCount:
        if shapes not in self._flops:
            args, kwargs = self._examples[shapes]
            self._flops[shapes] = measure_flops(
                self._meta_denoiser, lambda: self._meta_denoiser(*args, **kwargs)[0], checkpointing=self._checkpointing
            )
        flops = self._flops[shapes]
        forward = flops.forward if with_adapters else flops.forward_without_adapters
        if not with_gradient:
            return FlopCount(samples * forward)
        return FlopCount(samples * (forward + flops.backward), samples * flops.recompute)


def make_trainable(
    meta_denoiser: nn.Module,
    recipe: Recipe,
    targets: Sequence[str],
    names: Sequence[str],
    frozen: AbstractSet[str] = frozenset(),
    *,
    extra_adapters: Sequence[str] = (),
) -> None:
    """Prepare a denoiser on the meta device for training, like the engine does. Also sets the dtype.

    For LoRA, adds the adapter `default`, the adapters in `names` and the adapters in `extra_adapters`; `default` and
    the extra adapters are trained. For full training, freezes the parameters in `frozen`.
    """
    if recipe.lora is None:
        set_trainable(meta_denoiser, frozen)
    else:
        with torch.device("meta"):
            add_adapters(meta_denoiser, recipe.lora, targets, names, seed=0, extra=extra_adapters)
    for parameter in meta_denoiser.parameters():
        parameter.data = parameter.data.to(DTYPES[recipe.model.dtype])


def _argument_shape(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_argument_shape, value[:1]))
    return (tuple(value.shape[1:]), value.dtype) if isinstance(value, Tensor) else value


def _single_sample(value: Any) -> Any:
    if isinstance(value, list):
        return value[:1]
    return torch.empty_like(value[:1], device="meta") if isinstance(value, Tensor) else value
