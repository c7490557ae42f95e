"""Fused norms, modulations and gates in place of the modules of diffusers, for eager blocks (`engine.fused_norms`).

On a GPU, each chain of elementwise operators becomes one kernel of wfm_kernels. On a CPU, the operators of diffusers
run in the same order. Names, parameters and results of the modules stay the same, except for rounding. Other modules
keep their code. The blocks are in fused_blocks.py and fused_ltx2_block.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from diffusers.models.normalization import (
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    FP32LayerNorm,
    RMSNorm,
    SD35AdaLayerNormZeroX,
)
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from diffusers.models.transformers.transformer_cosmos import CosmosAdaLayerNormZero
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3NemotronRMSNorm
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformerBlock
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import Tensor, nn

from wfm_ds.engine.fused_blocks import BLOCK_FORWARDS, Forward, modulate
from wfm_ds.engine.fused_ltx2_block import forward_ltx2_block
from wfm_ds.errors import RecipeError
from wfm_kernels import MAX_NORM_ROW, adaptive_layer_norm, rms_norm

logger = logging.getLogger(__name__)


def fuse_norms(denoiser: nn.Module) -> int:
    """Replace the forward of each module whose class is in FORWARDS. Returns the number of replaced modules.

    Call it after adapters, gradient checkpointing and sequence parallelism are installed, and before DeepSpeed starts.
    Raises RecipeError if the denoiser has no such module.
    """
    count = 0
    for module in denoiser.modules():
        part: Any = module
        forward = FORWARDS.get(type(module))
        if forward is not None and can_fuse(module):
            part.forward = functools.partial(forward, part)
            count += 1
    if not count:
        raise RecipeError("engine.fused_norms: the denoiser has no norm that can be fused: remove the key")
    logger.info("%d modules with fused norms", count)
    return count


def can_fuse(module: nn.Module) -> bool:
    """Return whether the kernels support a module whose class is in FORWARDS."""
    part: Any = module
    if isinstance(module, FP32LayerNorm) and (part.weight is None or part.bias is None):
        return False  # the blocks pass these norms to the kernels together with their modulation
    if isinstance(module, RMSNorm):
        return part.bias is None and len(part.dim) == 1 and part.dim[0] <= MAX_NORM_ROW
    without_weights = (SanaTransformerBlock, SanaVideoTransformerBlock, LTX2VideoTransformerBlock)
    if isinstance(module, without_weights) and part.norm2.weight is not None:
        return False
    if isinstance(module, ZImageTransformerBlock) and not part.modulation:
        return False
    shapes = [norm.normalized_shape for norm in module.modules() if isinstance(norm, nn.LayerNorm)]
    shapes += [norm.dim for norm in module.modules() if isinstance(norm, RMSNorm)]
    return all(len(shape) == 1 and shape[0] <= MAX_NORM_ROW for shape in shapes)


def forward_rms_norm(norm: Any, hidden_states: Tensor, *, round_first: bool = True) -> Tensor:
    if norm.weight is not None and norm.weight.dtype != hidden_states.dtype:
        result: Tensor = type(norm).forward(norm, hidden_states)
        return result
    return rms_norm(hidden_states, norm.weight, eps=norm.eps, round_first=round_first)


def forward_layer_norm(norm: Any, inputs: Tensor) -> Tensor:
    """FP32LayerNorm with weight and bias, such as `norm2` of Wan's blocks."""
    if inputs.ndim != 3:
        result: Tensor = type(norm).forward(norm, inputs)
        return result
    weight, bias = (parameter.float()[None, None] for parameter in (norm.weight, norm.bias))
    return adaptive_layer_norm(inputs, weight, bias, eps=norm.eps, plus_one=False)


def forward_zero(
    norm: Any,
    x: Tensor,
    timestep: Tensor | None = None,
    class_labels: Tensor | None = None,
    hidden_dtype: Any = None,
    emb: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if norm.emb is not None:
        emb = norm.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
    shift, scale, gate, *mlp = norm.linear(norm.silu(emb)).chunk(6, dim=1)
    return modulate(norm.norm, x, scale, shift), gate, *mlp


def forward_zero_single(norm: Any, x: Tensor, emb: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shift, scale, gate = norm.linear(norm.silu(emb)).chunk(3, dim=1)
    return modulate(norm.norm, x, scale, shift), gate


def forward_sd35_zero(norm: Any, hidden_states: Tensor, emb: Tensor | None = None) -> tuple[Tensor, ...]:
    """The norm of SD3.5's blocks with two attentions: each has its own modulation."""
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp, shift2, scale2, gate2 = norm.linear(norm.silu(emb)).chunk(9, 1)
    first = modulate(norm.norm, hidden_states, scale, shift)
    second = modulate(norm.norm, hidden_states, scale2, shift2)
    return first, gate, shift_mlp, scale_mlp, gate_mlp, second, gate2


def forward_cosmos_zero(
    norm: Any, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    embedded = norm.linear_2(norm.linear_1(norm.activation(embedded_timestep)))
    if temb is not None:
        embedded = embedded + temb
    shift, scale, gate = (embedded if embedded.ndim == 3 else embedded.unsqueeze(1)).chunk(3, dim=-1)
    return modulate(norm.norm, hidden_states, scale, shift), gate


FORWARDS: Mapping[type[nn.Module], Forward] = {
    RMSNorm: forward_rms_norm,
    FP32LayerNorm: forward_layer_norm,
    Cosmos3NemotronRMSNorm: functools.partial(forward_rms_norm, round_first=False),
    AdaLayerNormZero: forward_zero,
    AdaLayerNormZeroSingle: forward_zero_single,
    SD35AdaLayerNormZeroX: forward_sd35_zero,
    CosmosAdaLayerNormZero: forward_cosmos_zero,
    LTX2VideoTransformerBlock: forward_ltx2_block,
    **BLOCK_FORWARDS,
}
"""{module class of diffusers: the function that replaces its forward}. Its first argument is the module."""
