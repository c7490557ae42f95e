"""Random weights of the tiny networks. Default initial values would hide errors in tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from wfm_ds.models.base import temporary_seed

TRANSFORMER_SEED = 0


def keep_weights(transformer: nn.Module) -> None:
    pass


def amplify_text(factor: float, transformer: nn.Module) -> None:
    """Multiply the values of text tokens in joint attention by `factor`, so that a prompt changes the image."""
    for name, weight in transformer.named_parameters():
        if ".add_v_proj." in name:
            weight.data.mul_(factor)


def amplify_cross_attention(transformer: Any) -> None:
    """Scale up the values of cross-attention, so that a prompt has a measurable effect."""
    for block in transformer.blocks:
        block.attn2.to_v.weight.data.mul_(4)


@torch.no_grad()
def perturb_vectors(transformer: nn.Module) -> None:
    """Add noise to vectors such as norm weights, which are initialized to zeros or ones."""
    for name, parameter in transformer.named_parameters():
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.add_(0.2 * torch.randn_like(parameter))


def randomize_padding(transformer: nn.Module) -> None:
    for name, token in transformer.named_parameters():
        if name.endswith("_pad_token"):
            nn.init.normal_(token)


@torch.no_grad()
def randomize_zero_weights(transformer: nn.Module) -> None:
    for name, weight in transformer.named_parameters():
        if ".conv_k" in name or "plucker_embedder" in name or ".t_conv" in name:
            weight.normal_(0, 0.3)


def build_transformer(
    class_or_name: type[nn.Module] | str,
    sizes: Mapping[str, Any],
    seed: int = TRANSFORMER_SEED,
    change_weights: Callable[[nn.Module], None] = keep_weights,
) -> Any:
    """Return a random transformer in evaluation mode.

    class_or_name: its class, or the name of its class in diffusers.
    change_weights: function that modifies the new transformer in place. Random numbers that it draws depend on `seed`.
    """
    with temporary_seed(seed):
        transformer = find_class(class_or_name)(**sizes)
        change_weights(transformer)
    return transformer.eval()


def find_class(class_or_name: type | str) -> Any:
    """Return a class, or the class of diffusers with this name."""
    return getattr(diffusers, class_or_name) if isinstance(class_or_name, str) else class_or_name


def build_encoder(class_name: str, config: Any, seed: int) -> Any:
    """Return a random transformers network in evaluation mode, with weights that make its output depend on the text."""
    with temporary_seed(seed):
        return redraw_text_weights(getattr(transformers, class_name)(config), seed).eval()


def redraw_text_weights(encoder: nn.Module, seed: int) -> nn.Module:
    """Reinitialize all weight matrices in place, so that embeddings clearly depend on the text."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in encoder.named_parameters():
        if weight.ndim != 2:
            continue
        if "position_embedding" in name:
            std = 0.3
        elif "token_embedding" in name or "embed_tokens" in name or name.startswith("shared."):
            std = 1.0
        else:
            std = 1.0 / math.sqrt(weight.shape[1])
        with torch.no_grad():
            weight.normal_(0.0, std, generator=generator)
    return encoder
