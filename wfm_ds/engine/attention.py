"""The kernel that computes the denoiser's attention: chosen and checked here, then given to every attention layer.

Trainer, rollout workers and `generate` ask this module, so that a recipe means the same to all of them. Kernels are
those of diffusers' dispatcher (diffusers.models.attention_dispatch); `native` leaves every layer as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_wm import SanaWMCrossAttnProcessor
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import nn

from wfm_ds.errors import UserError
from wfm_ds.recipe.stated import AttentionName
from wfm_ds.ulysses.cosmos3 import AttentionToText
from wfm_ds.ulysses.cosmos25 import CosmosAttention
from wfm_ds.ulysses.sd3 import JointAttention

Capability = tuple[int, int]

FASTER_FROM: Capability = (9, 0)  # where cuDNN's kernel is the faster one, and `auto` takes it
PROCESSORS: Mapping[type, Any] = {JointAttnProcessor2_0: JointAttention, CosmosAttnProcessor2_0: CosmosAttention}
"""For stock processors that name no kernel to the dispatcher, or do not ask it: those of ours in their place."""
# Processors that hide padding of the text by a mask.
MASKED = frozenset(
    {
        SanaAttnProcessor2_0,
        SanaWMCrossAttnProcessor,
        QwenDoubleStreamAttnProcessor2_0,
        ZSingleStreamAttnProcessor,
        AttentionToText,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel for bfloat16 on a GPU, and the attention that it can compute. None takes a mask."""

    backend: AttentionBackendName
    capabilities: tuple[Capability, Capability]  # of the GPU: from, below
    head_sizes: range  # channels of a head
    package: str = ""  # to install, in words; empty: part of torch
    has_backward: bool = True


KERNELS: Mapping[AttentionName, Kernel] = {
    "cudnn": Kernel(
        backend=AttentionBackendName._NATIVE_CUDNN,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(8, 129, 8),
    ),
    "flash": Kernel(
        backend=AttentionBackendName.FLASH,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(8, 257, 8),
        package="flash-attn 2.6.3 or newer (pip install flash-attn --no-build-isolation)",
    ),
    "flash3": Kernel(
        backend=AttentionBackendName._FLASH_3,
        capabilities=((9, 0), (10, 0)),
        head_sizes=range(8, 257, 8),
        package="FlashAttention-3 (flash_attn_interface, built from the folder hopper/ of flash-attention's sources)",
        has_backward=False,  # diffusers wraps it as an operator without a gradient
    ),
    "sage": Kernel(
        backend=AttentionBackendName.SAGE,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(64, 129, 32),
        package="sageattention 2.1.1 or newer (pip install sageattention)",
        has_backward=False,
    ),
}


def choose(
    name: AttentionName, denoiser: nn.Module, dtype: torch.dtype, device: torch.device, *, trains: bool
) -> AttentionName:
    """The kernel for this denoiser in this dtype on this device: `name`, or what `auto` means there.

    trains: whether gradients are wanted. Raises UserError, which says why and what to do, for a named one that cannot
    serve. Changes nothing; the weights may be on the meta device.
    """
    if name == "native":
        return name
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    wanted: AttentionName = "cudnn" if name == "auto" else name
    problem = obstacle(wanted, denoiser, dtype, capability, trains=trains)
    if name == "auto":
        fast = problem is None and capability is not None and capability >= FASTER_FROM
        return "cudnn" if fast else "native"
    if problem is not None:
        raise UserError(f"model.attention: {name} {problem}, or set it to auto or native")
    return name


def obstacle(
    name: AttentionName, denoiser: nn.Module, dtype: torch.dtype, capability: Capability | None, *, trains: bool
) -> str | None:
    """The first reason why a kernel cannot serve, with the way out; None if it can. capability: of the GPU, if any."""
    kernel, layers = KERNELS[name], list(attention_layers(denoiser))
    if trains and not kernel.has_backward:
        return "has no backward pass here, so nothing trains with it: keep it for rollout workers and generate"
    if not layers:
        return f"serves diffusers' attention layers, and {type(denoiser).__name__} has none: choose another model"
    for layer_name, layer in layers:
        processor = type(layer.processor)
        if processor in MASKED:
            return f"takes no mask, and {layer_name} has one ({processor.__name__}): choose another model"
        if processor not in PROCESSORS and not hasattr(processor, "_attention_backend"):
            own = f"which computes its attention itself ({processor.__name__})"
            return f"cannot serve {layer_name}, {own}: choose another model"
        if not (hasattr(layer, "inner_dim") and hasattr(layer, "heads")):
            return f"cannot serve {layer_name}, which does not state the size of its heads: choose another model"
        head_size = layer.inner_dim // layer.heads
        if head_size not in kernel.head_sizes:
            least, most, step = kernel.head_sizes[0], kernel.head_sizes[-1], kernel.head_sizes.step
            return (
                f"takes heads of {least} to {most} channels in steps of {step}, and {layer_name} has {head_size}: "
                "choose another model"
            )
    if torch.are_deterministic_algorithms_enabled():
        return "may add in any order, which engine.deterministic forbids: remove that key"
    if kernel.package and not is_installed(kernel.backend):
        return f"is not installed: install {kernel.package}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"does not compute in {str(dtype).removeprefix('torch.')}: set model.dtype: bfloat16"
    least_capability, too_new = kernel.capabilities
    if capability is None or not least_capability <= capability < too_new:
        here = "this device is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        return (
            f"needs a CUDA GPU of compute capability {least_capability[0]}.{least_capability[1]} or newer, below "
            f"{too_new[0]}.{too_new[1]}, and {here}: use another device"
        )
    return None


def is_installed(backend: AttentionBackendName) -> bool:
    """Tell if diffusers found the package behind one of its kernels, in a version that it takes."""
    try:
        with attention_backend(backend):
            return True
    except RuntimeError:  # what its check of the requirements raises
        return False


def attention_layers(denoiser: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers whose processor computes attention, by name."""
    for name, layer in denoiser.named_modules():
        if isinstance(layer, Attention | AttentionModuleMixin) and hasattr(layer, "processor"):
            yield name, layer


def use(denoiser: nn.Module, name: AttentionName) -> None:
    """Compute all attention with a kernel that `choose` chose. After `ulysses.install`, if that is called at all.

    diffusers' own set_attention_backend would change what every other model of the process does, too.
    """
    if name == "native":
        return
    for _, layer in attention_layers(denoiser):
        processor = PROCESSORS.get(type(layer.processor))
        if processor is not None:
            layer.set_processor(processor(None))
        layer.processor._attention_backend = KERNELS[name].backend


def in_use(denoiser: nn.Module) -> AttentionName:
    """The kernel that `use` gave to a denoiser."""
    backends = {getattr(layer.processor, "_attention_backend", None) for _, layer in attention_layers(denoiser)}
    return next((name for name, kernel in KERNELS.items() if kernel.backend in backends), "native")
