"""The edit demo: a model inverts one of two handwritten digits, and must not change the other one.

The report compares the SFT model, which follows a third of the instructions, with the model after RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.demos.base import Demo, comparison_table
from wfm_ds.demos.edits_data import PROMPTS, write_digit_edits
from wfm_ds.monitoring.line_chart import chart_html
from wfm_ds.monitoring.samples import list_sample_folders
from wfm_ds.storage.json_lines import read_json_rows

JUDGE, SECOND_JUDGE, PSNR = "edited_digits", "seen_edited_digits", "preservation/psnr_db"
MIN_PSNR_DB = 20.0  # PSNR outside the mask above which the rest of the image counts as kept
OUTCOMES: Mapping[str, str] = {
    "right": "right edits: the named digit is inverted, the rest is kept",
    "copy": "copies: the rest is kept, the named digit is not inverted",
    "leak": "leaks: the named digit is inverted, the rest changes",
    "neither": "neither: the named digit is not inverted, the rest changes",
}
"""{outcome of an edit: its row in the table}."""
OUTCOME_COLORS = {"right": (26, 127, 55), "copy": (9, 105, 218), "leak": (188, 76, 0), "neither": (110, 110, 110)}
NUM_SHOWN, SHOWN_PER_ROW = 16, 2  # sources in the image
IMAGE_FILE, BORDER_GREY = "edits.png", 160

EditRow = Mapping[str, Any]
"""A line of samples.jsonl, with the rewards of an edit."""


@dataclass(frozen=True, slots=True)
class EditScores:
    """Results of an evaluation: fractions of its edits, and the mean PSNR outside the mask."""

    right: float
    copies: float
    leaks: float
    judge: float
    second_judge: float
    psnr_db: float


class EditsDemo(Demo):
    name = "edits"
    description = "inverting one of two digits"
    sft_data = "sft"
    rl_data = "rl"
    output = Path("outputs/quickstart-edits")
    write_data = staticmethod(write_digit_edits)

    def rl_overrides(self, folder: Path) -> list[str]:
        return [f"validation.path={folder / 'data' / 'held_out'}"]

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        evaluations = list(load_edits(run).values())
        write_edit_image(folder / IMAGE_FILE, evaluations[0], evaluations[-1])
        before, after = score_edits(evaluations[0][1]), score_edits(evaluations[-1][1])
        rows = [
            (OUTCOMES["right"], before.right, after.right),
            (OUTCOMES["copy"], before.copies, after.copies),
            (OUTCOMES["leak"], before.leaks, after.leaks),
            ("classifier of the reward reads the inverted digit", before.judge, after.judge),
            ("second classifier (not used by RL)", before.second_judge, after.second_judge),
            ("PSNR outside the named half, in dB", before.psnr_db, after.psnr_db),
        ]
        image_path = (
            f"Image: {folder / IMAGE_FILE}. Left to right: source, SFT model, RL model. Below each image: the "
            "instruction or the outcome."
        )
        return [*comparison_table("on held-out sources", rows), "", image_path]

    def page_sections(self, folder: Path, run: Path) -> list[str]:
        scores = {step: score_edits(rows) for step, (_, rows) in load_edits(run).items()}
        curves = {
            "right edits": [(step, one.right) for step, one in scores.items()],
            "copies": [(step, one.copies) for step, one in scores.items()],
            "leaks": [(step, one.leaks) for step, one in scores.items()],
            "second classifier (not used by RL)": [(step, one.second_judge) for step, one in scores.items()],
        }
        return [
            "<h2>Edits of held-out sources over the RL steps</h2>",
            chart_html(curves, "RL step"),
            "<h2>Samples: source, SFT model, RL model</h2>",
            f'<p><img src="{IMAGE_FILE}" alt="sources and edits before and after RL"></p>',
        ]

    def generate_arguments(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / PROMPTS} --height 64 --width 128 --steps 6 --seeds 1 2 3 4 --batch 32 "
            f"--out {folder / 'more'}"
        )


def load_edits(run: Path) -> dict[int, tuple[Path, list[EditRow]]]:
    """Return {RL step: (folder of the samples, their rows)} of all evaluations of a run."""
    folders = list_sample_folders(run)
    return {step: (folder, list(read_json_rows(folder / "samples.jsonl"))) for step, folder in folders.items()}


def classify_edit(row: EditRow) -> str:
    """Return the key in OUTCOMES of an edit. An edit without rewards is `neither`."""
    is_inverted = row["rewards"].get(JUDGE) == 1
    is_kept = row.get("parts", {}).get(PSNR, 0.0) > MIN_PSNR_DB
    return ("right" if is_kept else "leak") if is_inverted else ("copy" if is_kept else "neither")


def score_edits(rows: Sequence[EditRow]) -> EditScores:
    outcomes = [classify_edit(row) for row in rows]
    right, copies, leaks = (outcomes.count(name) / len(rows) for name in ("right", "copy", "leak"))
    judge, second = (
        float(np.mean([row["rewards"].get(name) or 0.0 for row in rows])) for name in (JUDGE, SECOND_JUDGE)
    )
    psnr = [row["parts"][PSNR] for row in rows if PSNR in row.get("parts", {})]
    return EditScores(right, copies, leaks, judge, second, float(np.mean(psnr)))


def write_edit_image(path: Path, before: tuple[Path, Sequence[EditRow]], after: tuple[Path, Sequence[EditRow]]) -> None:
    """Write an image of NUM_SHOWN sources, each with its edits before and after RL.

    before, after: (folder of the samples, their rows) of an evaluation.
    """
    from wfm_ds.monitoring.media_files import image_grid, save_png

    images, labels, colors = [], [], []
    for row in select_shown(before[1]):
        other = next(r for r in after[1] if (r["prompt_id"], r["seed"]) == (row["prompt_id"], row["seed"]))
        images += [
            load_image(before[0] / row["images"]["source"]),
            load_image(before[0] / row["file"]),
            load_image(after[0] / other["file"]),
        ]
        outcomes = [classify_edit(row), classify_edit(other)]
        labels += [row["prompt"], *outcomes]
        colors += [(0, 0, 0), *(OUTCOME_COLORS[outcome] for outcome in outcomes)]
    save_png(path, image_grid(images, 3 * SHOWN_PER_ROW, labels=labels, label_colors=colors))


def select_shown(rows: Sequence[EditRow]) -> list[EditRow]:
    """Return one row for each of the first NUM_SHOWN sources. The noise seeds take turns."""
    by_source: dict[str, list[EditRow]] = {}
    for row in rows:
        by_source.setdefault(row["prompt_id"], []).append(row)
    return [of_one[k % len(of_one)] for k, of_one in enumerate(list(by_source.values())[:NUM_SHOWN])]


def load_image(path: Path) -> npt.NDArray[np.uint8]:
    """Load an image with a grey border, because inverted digits are on white, like the page."""
    from PIL import Image

    return np.pad(np.asarray(Image.open(path).convert("RGB")), ((1, 1), (1, 1), (0, 0)), constant_values=BORDER_GREY)
