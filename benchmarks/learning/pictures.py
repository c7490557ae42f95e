"""Plot the study: reward, held-out classifier and reward std over forward passes, for each start.

`python -m benchmarks.learning.pictures RESULTS... IMAGE` plots several results' files without their runs, and without
variants with a float8 base. If two files contain a variant, the later file is used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.learning.curves import Evaluation
from benchmarks.learning.variants import BASELINES, FP8, IN_FLOAT8, OF_THE_STUDY, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {"reward": "held-out reward", "unseen": "held-out classifier", "spread": "std within prompts"}


def main(argv: Sequence[str]) -> None:
    *results, image_path = map(Path, argv)
    found = {}
    for path in results:
        for key, of_seeds in json.loads(path.read_text())["curves"].items():
            name, _, start = key.rpartition("_")
            found[name, int(start)] = [[Evaluation(**at) for at in curve] for curve in of_seeds]
    in_order = sorted(
        (of for of in found if of[0] not in IN_FLOAT8), key=lambda of: (list(VARIANTS).index(of[0]), of[1])
    )
    plot_curves({of: found[of] for of in in_order}, image_path)


def plot_curves(curves: Mapping[tuple[str, int], Sequence[Sequence[Evaluation]]], path: Path) -> None:
    """Plot one row for each start: a line for each variant's mean over seeds, and a band for the range of its seeds.
    Variants with published settings are dashed. Variants with a float8 base are dotted, in the color of the variant
    without it."""
    from matplotlib.figure import Figure

    starts = sorted({start for _, start in curves})
    figure = Figure(figsize=(12, 3.9 * len(starts)), layout="constrained")
    grid = figure.subplots(len(starts), len(PANELS), squeeze=False)
    for start, of_row in zip(starts, grid, strict=True):
        for axes, (y, title) in zip(of_row, PANELS.items(), strict=True):
            for (name, of_start), of_seeds in curves.items():
                if of_start == start:
                    draw_variant(axes, name, of_seeds, y)
            axes.set(xlabel="thousand forwards", title=f"{title}, start {start}")
            axes.grid(alpha=0.3)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=80)


def draw_variant(axes: Axes, name: str, of_seeds: Sequence[Sequence[Evaluation]], y: str) -> None:
    places = [np.array([e.forwards / 1e3 for e in curve]) for curve in of_seeds]
    values = [np.array([getattr(e, y) for e in curve]) for curve in of_seeds]
    common = np.linspace(0, min(p[-1] for p in places), 100)
    lines = np.stack([np.interp(common, p, v) for p, v in zip(places, values, strict=True)])
    color = f"C{list(OF_THE_STUDY).index(name.removesuffix(FP8))}"
    style = "--" if name in BASELINES else ":" if name in IN_FLOAT8 else "-"
    axes.plot(common, lines.mean(0), color=color, linestyle=style, label=VARIANTS[name].title)
    axes.fill_between(common, lines.min(0), lines.max(0), color=color, alpha=0.12, linewidth=0)


if __name__ == "__main__":
    main(sys.argv[1:])
