"""Specifications of the inputs of a model family, other than text and conditioning frames."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """An input of a model family in addition to text and conditioning frames.

    An example is `actions` with shape [number of frames - 1, numbers per action].
    """

    rank: int  # number of axes of one sample's array; 0 for a scalar
    required: bool = False
    requires_input: str | None = None  # name of an input that must be given together with this one
