"""Base class of the quickstart's demos: data, model, recipes, and the comparison before and after RL."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

EvaluationMetrics = Mapping[str, float]


class Demo(ABC):
    """A demo: synthetic data, an untrained tiny model, and the SFT and RL recipes in recipes/NAME/."""

    name: ClassVar[str]
    """Name of its tiny pipeline and of its folder in recipes/."""
    description: ClassVar[str]
    """Description of its data, for messages."""
    sft_data: ClassVar[str]
    """Subfolder of the data used by SFT."""
    rl_data: ClassVar[str] = "prompts"
    """Subfolder of the data used by RL: prompts, or clips with the first frames of the samples."""
    output: ClassVar[Path]
    """Default output folder."""

    @abstractmethod
    def write_data(self, out: Path) -> int:
        """Write the data into a new or empty folder. Return the number of images or videos."""

    def sft_overrides(self, folder: Path) -> list[str]:
        """Return recipe overrides for SFT that set further paths in `folder`, besides model.path and data.path."""
        return []

    def rl_overrides(self, folder: Path) -> list[str]:
        """Return recipe overrides for RL that set further paths in `folder`, besides model.path and data.path."""
        return []

    @abstractmethod
    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        """Write images of the first and the last evaluation of the RL run into `folder`.

        run: output folder of the RL run. Returns the lines of the report that compare the two evaluations.
        """

    @abstractmethod
    def generate_arguments(self, folder: Path) -> str:
        """Return the arguments with which wfm_ds.cli.generate generates more samples, except the model's arguments."""


def find_sft_pipeline(run: Path) -> str:
    """Return the SFT pipeline folder that an RL run trains, as stored in the run's recipe.yaml."""
    from wfm_ds.recipe.file import load_stored_recipe  # local import: slow, and --help does not need it

    return load_stored_recipe(run / "recipe.yaml").model.path


def load_evaluations(run: Path, tag: str) -> list[tuple[Path, EvaluationMetrics]]:
    """Return (samples folder, metrics) of each evaluation of a run, in order.

    tag: name of a metric that every evaluation logs.
    """
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(int(folder.name.removeprefix("step_")) for folder in (run / "samples").iterdir())
    metric_records = [record for record in records if tag in record]
    return [(run / "samples" / f"step_{step}", metrics) for step, metrics in zip(steps, metric_records, strict=True)]


def comparison_table(title: str, rows: Sequence[tuple[str, float, float]], digits: int = 3) -> list[str]:
    """Return a markdown table of values before and after RL."""
    head = [f"| {title} | before RL | after RL |", "|---|---|---|"]
    return [*head, *(f"| {label} | {before:.{digits}f} | {after:.{digits}f} |" for label, before, after in rows)]
