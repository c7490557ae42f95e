"""Conditioning data besides text and given frames: what a family says that it takes of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One kind of conditioning data, such as actions [F-1,D]."""

    rank: int  # number of axes of one sample's array: 0 is a number
    required: bool = False
    beside: str | None = None  # another input, without which it says nothing
