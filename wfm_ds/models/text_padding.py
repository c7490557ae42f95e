"""Padding for text conditioning with a variable number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from wfm_ds.types import Conditioning


def pad_and_stack(rows: Sequence[Conditioning], *groups: Sequence[str]) -> Conditioning:
    """Concatenate conditioning tensors along the batch axis.

    groups: names of tensors [batch, tokens, ...], including masks. The tensors of a group are padded with zeros to the
    largest number of tokens. Default: one group of all tensors.
    """
    groups = groups or (tuple(rows[0]),)
    longest = {name: max(row[other].shape[1] for row in rows for other in group) for group in groups for name in group}

    def pad_tokens(name: str, tensor: Tensor) -> Tensor:
        missing = longest[name] - tensor.shape[1] if name in longest else 0
        return functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, missing)) if missing else tensor

    return {name: torch.cat([pad_tokens(name, row[name]) for row in rows]) for name in rows[0]}
