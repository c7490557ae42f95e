"""The forward passes of a guided prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GuidancePass:
    """A forward pass without gradient, in addition to the conditional pass."""

    name: str  # key of its prediction in `DiffusionModel.combine_passes`
    negative: bool = False  # whether it is conditioned on the negative prompt
    variant: str = ""  # last argument of `DiffusionModel.denoise`: a change of the network. "": none


NEGATIVE_PASS = GuidancePass("negative", negative=True)  # the unconditional pass of classifier-free guidance


def format_blocks(blocks: Sequence[int]) -> str:
    """Return the numbers of blocks as a variant of a pass, such as `7,8,9`."""
    return ",".join(map(str, blocks))


def parse_blocks(variant: str) -> tuple[int, ...]:
    """The inverse of `format_blocks`."""
    return tuple(map(int, variant.split(",")))


def choose_rows(sigma: Tensor, low: float, high: float, inside: Tensor, outside: Tensor) -> Tensor:
    """Return the rows of `inside` with low <= sigma <= high, and the rows of `outside` otherwise.

    sigma: [batch]. inside, outside: [batch, ...].
    """
    is_inside = (sigma >= low) & (sigma <= high)
    return torch.where(is_inside.view(-1, *[1] * (inside.ndim - 1)), inside, outside)
