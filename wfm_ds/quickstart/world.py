"""The base of the quickstart's worlds: what is drawn in them, and how what was learnt is shown."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

Metrics = Mapping[str, float]


class World(ABC):
    """A small world: its data, its untrained model, and its recipes, which are those of recipes/NAME/."""

    name: ClassVar[str]
    """Of the tiny pipeline, of the folder of recipes and of `--world`."""
    what: ClassVar[str]
    """What its data shows."""
    media: ClassVar[str]
    """The folder of its data that SFT learns from."""
    asked: ClassVar[str] = "prompts"
    """The folder of its data that RL is asked for: prompts, or clips that samples begin with."""
    output: ClassVar[Path]
    """Where its quickstart leaves everything, unless told otherwise."""

    @abstractmethod
    def write(self, out: Path) -> int:
        """Write the data into a new or empty folder; return the number of media."""

    def sft_overrides(self, folder: Path) -> list[str]:
        """Keys of the SFT recipe that name files of the quickstart's folder, beside its model and data."""
        return []

    def rl_overrides(self, folder: Path) -> list[str]:
        """Keys of the RL recipe that name files of the quickstart's folder, beside its model and data."""
        return []

    @abstractmethod
    def show(self, folder: Path, run: Path) -> list[str]:
        """Write pictures of the first and the last evaluation of the RL run into the folder; return the lines that
        compare them."""

    @abstractmethod
    def more(self, folder: Path) -> str:
        """Return the arguments of wfm_ds.generate that draw more of it, but for the models."""


def sft_pipeline(run: Path) -> str:
    """The pipeline folder that the RL run started from, as its resolved recipe names it."""
    from wfm_ds.recipe.file import load  # a third of a second that --help need not pay

    return load(run / "recipe.yaml").model.path


def evaluations(run: Path, tag: str) -> list[tuple[Path, Metrics]]:
    """Return the evaluations of a run, first to last: the folder of samples, and the metrics among which is `tag`."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(int(folder.name.removeprefix("step_")) for folder in (run / "samples").iterdir())
    found = [record for record in records if tag in record]
    return [(run / "samples" / f"step_{step}", metrics) for step, metrics in zip(steps, found, strict=True)]


def table(title: str, rows: Sequence[tuple[str, float, float]], digits: int = 3) -> list[str]:
    """Return a markdown table of values before and after RL."""
    head = [f"| {title} | before RL | after RL |", "|---|---|---|"]
    return [*head, *(f"| {label} | {before:.{digits}f} | {after:.{digits}f} |" for label, before, after in rows)]
