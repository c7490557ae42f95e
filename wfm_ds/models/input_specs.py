"""Specifications of the inputs of model families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input of a model family in addition to text and conditioning frames, such as `actions`."""

    rank: int  # number of axes of one sample's array; 0 for a scalar
    required: bool = False
    requires_input: str | None = None  # name of an input that must be given together with this one
    is_image: bool = False  # uint8 pixels [h,w,3]
