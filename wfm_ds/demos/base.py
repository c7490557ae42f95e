"""Base class of the quickstart's demos. A demo has data, a model, recipes, and a comparison of before and after RL."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

EvaluationMetrics = Mapping[str, float]


class Demo(ABC):
    """A quickstart demo: its data, an untrained tiny model, and the SFT and RL recipes in recipes/NAME/."""

    name: ClassVar[str]
    """Name of the tiny pipeline, and of the demo's folder in recipes/."""
    description: ClassVar[str]
    """Short description of the data, for messages."""
    sft_data: ClassVar[str]
    """Subfolder of the data that SFT trains on."""
    rl_data: ClassVar[str] = "prompts"
    """Subfolder of the data that RL uses: prompts, or clips that provide the first frames of the samples."""
    output: ClassVar[Path]
    """Default output folder of the quickstart."""

    @abstractmethod
    def write_data(self, out: Path) -> int:
        """Write the data into a new or empty folder, and return the number of images or videos."""

    def sft_overrides(self, folder: Path) -> list[str]:
        """Return recipe overrides for SFT that set paths in `folder`. Does not include model.path and data.path."""
        return []

    def rl_overrides(self, folder: Path) -> list[str]:
        """Return recipe overrides for RL that set paths in `folder`. Does not include model.path and data.path."""
        return []

    @abstractmethod
    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        """Write images of the first and last evaluation of an RL run into `folder`. Returns the lines of the report.

        run: output folder of the RL run.
        """

    @abstractmethod
    def generate_arguments(self, folder: Path) -> str:
        """Return the arguments of `wfm generate` for more samples, without the options that select the model."""


def find_sft_pipeline(run: Path) -> str:
    """Return the folder of the SFT pipeline that an RL run started from, as stored in the run's recipe.yaml."""
    from wfm_ds.recipe.file import load_stored_recipe  # slow import, not needed for --help

    return load_stored_recipe(run / "recipe.yaml").model.path


def load_evaluations(run: Path, tag: str) -> list[tuple[Path, EvaluationMetrics]]:
    """Return (samples folder, metrics) of each evaluation of a run, in order.

    tag: a metric that all evaluations log.
    """
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = sorted(int(folder.name.removeprefix("step_")) for folder in (run / "samples").iterdir())
    metric_records = [record for record in records if tag in record]
    return [(run / "samples" / f"step_{step}", metrics) for step, metrics in zip(steps, metric_records, strict=True)]


def comparison_table(title: str, rows: Sequence[tuple[str, float, float]], digits: int = 3) -> list[str]:
    """Return the lines of a Markdown table. rows: (label, value before RL, value after RL)."""
    head = [f"| {title} | before RL | after RL |", "|---|---|---|"]
    return [*head, *(f"| {label} | {before:.{digits}f} | {after:.{digits}f} |" for label, before, after in rows)]
