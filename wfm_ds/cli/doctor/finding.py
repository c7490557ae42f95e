"""Findings of `wfm doctor`: the result of a check with severity and advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wfm_ds.errors import UserError

FindingLevel = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Result of one check. The level `error` means that a run cannot work, `warning` that it may fail or be slow."""

    name: str
    level: FindingLevel
    text: str
    advice: str = ""


def run_check(name: str, action: Callable[[], str], advice: str = "") -> DoctorFinding:
    """Run a check. The text that `action` returns becomes an `ok` finding, its UserError an `error` finding."""
    try:
        return DoctorFinding(name, "ok", action())
    except UserError as error:
        return DoctorFinding(name, "error", str(error), advice)
