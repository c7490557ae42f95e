"""Findings of `python -m wfm_ds.doctor`: one statement each, whether it stands in the way, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wfm_ds.errors import UserError

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`error`: a run cannot work; `warning`: it may fail or be slow."""

    name: str
    level: Level
    text: str
    advice: str = ""


def attempt(name: str, action: Callable[[], str], advice: str = "") -> Finding:
    """Return whether an action, whose result says what it found, raises what a user can cause."""
    try:
        return Finding(name, "ok", action())
    except UserError as error:
        return Finding(name, "error", str(error), advice)
