"""Base class of the quickstart's demos."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from wfm_ds.storage.json_lines import read_json_rows


class Demo(ABC):
    """A quickstart demo: its data, an untrained tiny model, and the SFT and RL recipes in recipes/NAME/."""

    name: ClassVar[str]
    """Name of the demo's folder in recipes/."""
    pipeline: ClassVar[str] = ""
    """Name of the tiny pipeline that SFT starts from. If it is empty, the name of the demo is used."""
    description: ClassVar[str]
    """Short description of the data, for messages."""
    sft_data: ClassVar[str]
    """Subfolder of the data that SFT trains on."""
    rl_data: ClassVar[str] = "prompts"
    """Subfolder of the data that RL uses: prompts, or clips that provide the first frames of the samples."""
    rl_recipes: ClassVar[Sequence[str]] = ("nft",)
    """RL recipes that the quickstart runs by default, each from the SFT model. The report shows the last."""
    output: ClassVar[Path]
    """Default output folder of the quickstart."""
    curves: ClassVar[Mapping[str, str]] = {}
    """Curves of the report: {label: metric of the evaluations, with values from 0 to 1}."""

    @staticmethod
    @abstractmethod
    def write_data(out: Path) -> int:
        """Write the data into a new or empty folder, and return the number of images or videos."""

    def sft_overrides(self, folder: Path) -> list[str]:
        """Return overrides that set paths of the SFT recipe, except model.path and data.path, to files in `folder`."""
        return []

    def rl_overrides(self, folder: Path) -> list[str]:
        """Return overrides that set paths of the RL recipe, except model.path and data.path, to files in `folder`."""
        return []

    @abstractmethod
    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        """Write images of the first and last evaluation of an RL run into `folder`. Returns the lines of the report.

        run: output folder of the RL run.
        """

    def page_sections(self, folder: Path, run: Path) -> list[str]:
        """Return HTML for the report page. [] selects the default: the curves and samples of the RL run."""
        return []

    @abstractmethod
    def generate_arguments(self, folder: Path) -> str:
        """Return arguments of `wfm generate` for more samples, without the options that select the model."""


def find_sft_pipeline(run: Path) -> str:
    from wfm_ds.recipe.file import load_stored_recipe  # slow import, not needed for --help

    return load_stored_recipe(run / "recipe.yaml").model.path


def load_evaluations(run: Path, tag: str) -> list[tuple[Path, Mapping[str, float]]]:
    """Return (samples folder, metrics) of each evaluation of a run, in order.

    tag: name of a metric that every evaluation writes to metrics.jsonl.
    """
    from wfm_ds.monitoring.samples import list_sample_folders  # slow import, not needed for --help

    records = [record for record in read_json_rows(run / "metrics.jsonl") if tag in record]
    return list(zip(list_sample_folders(run).values(), records, strict=True))


def comparison_table(title: str, rows: Sequence[tuple[str, float, float]], digits: int = 3) -> list[str]:
    """Return the lines of a Markdown table. rows: (label, value before RL, value after RL)."""
    head = [f"| {title} | before RL | after RL |", "|---|---|---|"]
    return [*head, *(f"| {label} | {before:.{digits}f} | {after:.{digits}f} |" for label, before, after in rows)]
