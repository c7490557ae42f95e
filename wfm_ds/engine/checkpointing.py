"""Gradient checkpointing of the denoiser's transformer blocks, with or without recomputed attention."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from wfm_ds.recipe.shared_defaults import Checkpointing

ATTENTION_OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
        *("flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd"),  # FlashAttention-3, newer and older versions
    }
)
"""Fused attention operators. Their backward passes read their inputs and outputs only."""


def enable_checkpointing(denoiser: nn.Module, setting: Checkpointing) -> None:
    """Enable gradient checkpointing of the transformer blocks. setting: value of model.gradient_checkpointing."""
    module: Any = denoiser
    if setting == "attention":
        module.enable_gradient_checkpointing(checkpoint_except_attention)
    elif setting:
        module.enable_gradient_checkpointing()


def checkpoint_except_attention(block: nn.Module, *args: Any) -> Any:
    """Run a block. Its backward pass recomputes all activations except the attention outputs of `keeps_output`."""

    def share_outputs() -> tuple[_SharedOutputs, _SharedOutputs]:
        outputs: deque[Any] = deque()
        return _SharedOutputs(outputs, reuse=False), _SharedOutputs(outputs, reuse=True)

    return checkpoint(block.__call__, *args, use_reentrant=False, context_fn=share_outputs)


@functools.cache
def is_fused_attention(operator: Any) -> bool:
    return operator.name().partition(".")[0] in ATTENTION_OPERATORS


def keeps_output(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether checkpoint_except_attention keeps the output of this operator.

    Attention over fewer keys than queries, such as cross-attention to texts, is recomputed: its output takes as much
    memory as the output of self-attention, and recomputing it takes much less time. Attention with dropout is
    recomputed, because later random numbers of the block depend on it.
    """
    if not is_fused_attention(operator):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    query, key = args[0], args[1]
    axis = 1 if names[0] == "q" else 2  # flash_attn: [B,S,H,D], torch: [B,H,S,D]
    return bool(key.shape[axis] >= query.shape[axis]) and not values.get("dropout_p")


# torch's create_selective_checkpoint_contexts requires that both passes call equally many operators of each type. At
# ZeRO-3, they do not: DeepSpeed gathers weights inside the block and prefetches others at different times.


class _SharedOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps outputs during the forward pass. With `reuse`, returns them while the block is recomputed."""

    def __init__(self, outputs: deque[Any], *, reuse: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs, self._reuse = outputs, reuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_kept = keeps_output(func, args, kwargs or {})
        if is_kept and self._reuse and self._outputs:
            return self._outputs.popleft()
        result = func(*args, **(kwargs or {}))
        if is_kept and not self._reuse:
            # Autograd attaches a graph to the result. The kept tensors must not reference this graph.
            self._outputs.append(tree_map_only(Tensor, Tensor.detach, result))
        return result
