"""Selection of the denoiser's attention kernel and its installation in every attention layer.

The kernels come from diffusers.models.attention_dispatch. The kernel `native` leaves every layer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2PerturbedAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_video import SanaAttnProcessor2_0
from diffusers.models.transformers.transformer_sana_wm import SanaWMCrossAttnProcessor
from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor
from torch import Tensor, nn

from wfm_ds.errors import UserError
from wfm_ds.recipe.shared_defaults import AttentionName
from wfm_ds.ulysses.cosmos3 import Cosmos3Attention
from wfm_ds.ulysses.cosmos25 import Cosmos25Attention
from wfm_ds.ulysses.sd3 import SD3JointAttention

Capability = tuple[int, int]

REPLACEMENT_PROCESSORS: Mapping[type, Any] = {
    JointAttnProcessor2_0: SD3JointAttention,
    CosmosAttnProcessor2_0: Cosmos25Attention,
}
"""{processor of diffusers that does not let a model select a kernel: its replacement}."""
# Processors that pass an attention mask for padded texts. No kernel of this module supports masks.
MASKED_PROCESSORS = frozenset(
    {
        SanaAttnProcessor2_0,
        SanaWMCrossAttnProcessor,
        QwenDoubleStreamAttnProcessor2_0,
        ZSingleStreamAttnProcessor,
        LTX2AudioVideoAttnProcessor,
        LTX2PerturbedAttnProcessor,
        Cosmos3Attention,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernel:
    """An attention kernel for GPUs and half precision, and its requirements. It does not support attention masks."""

    backend: AttentionBackendName
    capabilities: tuple[Capability, Capability]  # compute capability of the GPU: lowest supported, first unsupported
    head_sizes: range  # channels per head
    package: str = ""  # how to install the kernel; empty if it is part of torch
    has_backward: bool = True


KERNELS: Mapping[AttentionName, AttentionKernel] = {
    "cudnn": AttentionKernel(
        backend=AttentionBackendName._NATIVE_CUDNN,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(8, 129, 8),
    ),
    "flash": AttentionKernel(
        backend=AttentionBackendName.FLASH,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(8, 257, 8),
        package="flash-attn 2.6.3 or newer (pip install flash-attn --no-build-isolation)",
    ),
    "flash3": AttentionKernel(
        backend=AttentionBackendName._FLASH_3,
        capabilities=((9, 0), (10, 0)),
        head_sizes=range(8, 257, 8),
        package="FlashAttention-3 (flash_attn_interface, built from the folder hopper/ of flash-attention's sources)",
    ),
    "sage": AttentionKernel(
        backend=AttentionBackendName.SAGE,
        capabilities=((8, 0), (13, 0)),
        head_sizes=range(64, 129, 32),
        package="sageattention 2.1.1 or newer (pip install sageattention)",
        has_backward=False,
    ),
}


def choose_kernel(
    name: AttentionName, denoiser: nn.Module, dtype: torch.dtype, device: torch.device, *, trains: bool
) -> AttentionName:
    """Return the attention kernel to use: `name`, or `native` for `auto`.

    torch selects cuDNN itself on GPUs of compute capability 9 and 10 if cuDNN is newer than 9.15.0. Older versions of
    cuDNN have memory errors for numbers of tokens that are not multiples of 128. diffusers' kernel `cudnn` copies
    queries, keys and values to another layout first, which `native` does not need.

    denoiser: may be on the meta device. trains: whether gradients are needed. Raises UserError if the kernel `name`
    cannot be used.
    """
    if name in ("auto", "native"):
        return "native"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = find_obstacle(name, denoiser, dtype, capability, trains=trains)
    if problem is not None:
        raise UserError(f"model.attention: {name} {problem}, or set it to auto or native")
    return name


def find_obstacle(
    name: AttentionName, denoiser: nn.Module, dtype: torch.dtype, capability: Capability | None, *, trains: bool
) -> str | None:
    """Return why the kernel `name` cannot be used and how to fix it, or None if it can be used.

    capability: compute capability of the GPU, or None on a CPU.
    """
    kernel, layers = KERNELS[name], list(attention_layers(denoiser))
    if trains and not kernel.has_backward:
        return "has no backward pass and cannot be used for training: use it for rollout workers and generate"
    if not layers:
        return "supports diffusers' attention layers only, and the denoiser has none: choose another model"
    for layer_name, layer in layers:
        processor = type(layer.processor)
        if processor in MASKED_PROCESSORS:
            return f"does not support masks, and {layer_name} has one: choose another model"
        if processor not in REPLACEMENT_PROCESSORS and not hasattr(processor, "_attention_backend"):
            return f"does not support {layer_name}, which computes its attention itself: choose another model"
        if not (hasattr(layer, "inner_dim") and hasattr(layer, "heads")):
            return f"does not support {layer_name}, which does not define the size of its heads: choose another model"
        head_size = layer.inner_dim // layer.heads
        if head_size not in kernel.head_sizes:
            least, most, step = kernel.head_sizes[0], kernel.head_sizes[-1], kernel.head_sizes.step
            return (
                f"supports heads of {least} to {most} channels in steps of {step}, and {layer_name} has "
                f"{head_size}: choose another model"
            )
    if torch.are_deterministic_algorithms_enabled():
        return "is not deterministic, which engine.deterministic requires: remove that key"
    if kernel.package and not is_installed(kernel.backend):
        return f"is not installed: install {kernel.package}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"does not support {str(dtype).removeprefix('torch.')}: set model.dtype: bfloat16"
    least_capability, too_new = kernel.capabilities
    if capability is None or not least_capability <= capability < too_new:
        here = (
            "this device is not a CUDA GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        )
        return (
            f"needs a CUDA GPU of compute capability {least_capability[0]}.{least_capability[1]} or newer, below "
            f"{too_new[0]}.{too_new[1]}, but {here}: use another device"
        )
    return None


def is_installed(backend: AttentionBackendName) -> bool:
    try:
        with attention_backend(backend):
            return True
    except RuntimeError:  # raised by diffusers' check of the requirements
        return False


def attention_layers(denoiser: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in denoiser.named_modules():
        if isinstance(layer, Attention | AttentionModuleMixin) and hasattr(layer, "processor"):
            yield name, layer


def attend_with_flash3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    scale: float | None = None,
    is_causal: bool = False,
    return_lse: bool = False,
    _parallel_config: None = None,
) -> Tensor:
    """Call FlashAttention-3 with a gradient: diffusers wraps it as an operator without one.

    query, key, value: [batch, tokens, heads, channels], like the result. The signature is that of diffusers' function.
    """
    from flash_attn_interface import flash_attn_func

    if attn_mask is not None or return_lse:
        raise ValueError("FlashAttention-3 supports neither attn_mask nor return_lse")
    result = flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal)
    out: Tensor = result[0] if isinstance(result, tuple) else result  # older versions also return the log-sum-exp
    return out


def use_kernel(denoiser: nn.Module, name: AttentionName, *, trains: bool = False) -> None:
    """Set the kernel of all attention layers. name: result of `choose_kernel`. trains: whether gradients are needed.

    If the denoiser uses sequence parallelism, install that first.
    """
    if name == "native":
        return
    if name == "flash3" and trains:
        _AttentionBackendRegistry._backends[KERNELS[name].backend] = attend_with_flash3
    # Do not call diffusers' set_attention_backend, because it also changes every other model in the process.
    for _, layer in attention_layers(denoiser):
        processor = REPLACEMENT_PROCESSORS.get(type(layer.processor))
        if processor is not None:
            layer.set_processor(processor(None))
        layer.processor._attention_backend = KERNELS[name].backend


def current_kernel(denoiser: nn.Module) -> AttentionName:
    """Return the kernel that `use_kernel` has set for this denoiser, or `native` if it was not called."""
    backends = {getattr(layer.processor, "_attention_backend", None) for _, layer in attention_layers(denoiser)}
    return next((name for name, kernel in KERNELS.items() if kernel.backend in backends), "native")
