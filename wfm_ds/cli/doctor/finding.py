"""Findings of `wfm doctor`: results of its checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from wfm_ds.errors import UserError

FindingLevel = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Result of one check. Level `error`: a run cannot work. Level `warning`: a run may fail or be slow."""

    name: str
    level: FindingLevel
    text: str
    advice: str = ""


def run_check(name: str, action: Callable[[], str], advice: str = "") -> DoctorFinding:
    """Return an `ok` finding with the text that `action` returns, or an `error` if `action` raises UserError."""
    try:
        return DoctorFinding(name, "ok", action())
    except UserError as error:
        return DoctorFinding(name, "error", str(error), advice)
