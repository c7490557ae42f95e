"""Padding for text conditioning with a variable number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from wfm_ds.types import Conditioning


def pad_and_stack(rows: Sequence[Conditioning]) -> Conditioning:
    """Concatenate conditioning tensors [batch, tokens, ...] along the batch axis.

    Tensors with fewer tokens, including masks, are padded with zeros to the largest number of tokens.
    """
    longest = max(tensor.shape[1] for row in rows for tensor in row.values())
    return {
        name: torch.cat(
            [
                functional.pad(row[name], (*[0, 0] * (row[name].ndim - 2), 0, longest - row[name].shape[1]))
                for row in rows
            ]
        )
        for name in rows[0]
    }
