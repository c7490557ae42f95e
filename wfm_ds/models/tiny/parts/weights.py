"""Random weights for tiny models in which the text has a visible effect."""

from __future__ import annotations

import math

import torch
from torch import nn


def amplify_text(transformer: nn.Module, factor: float) -> nn.Module:
    """Scale the value projections of text tokens in joint attention, in place.

    With the default scale, a prompt hardly changes an image.
    """
    for name, weight in transformer.named_parameters():
        if ".add_v_proj." in name:
            weight.data.mul_(factor)
    return transformer


def redraw_text_weights(encoder: nn.Module, seed: int) -> nn.Module:
    """Reinitialize all matrices in place, so that embeddings depend on the text.

    Their std is larger than the default of 0.02.
    """
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
