"""Lines of a recipe that `wfm init` writes, and the options that they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wfm_ds.cli.init.data_summary import DataSummary, Task


class RecipeLine(NamedTuple):
    key: str  # "# KEY" for a suggestion that is commented out
    value: Any
    comment: str = ""


Sections = dict[str, list[RecipeLine]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRequest:
    """The options of `wfm init`, after questions and defaults."""

    task: Task
    data: DataSummary
    model_path: str
    trains_all_weights: bool
    out: Path
    reward: str | None = None  # of RL
    held_out_reward: str | None = None
    prompt: str | None = None  # caption for files without one
