"""Data of the edit demo: two handwritten digits side by side, and instructions to invert one of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.demos.digits_data import DigitSplit, sft_split
from wfm_ds.demos.files import require_new_folder, write_json_rows
from wfm_ds.seeds import derive_seed

DIGIT_SIZE = 64  # pixels; the digits of scikit-learn have 8 x 8 pixels
CELL = DIGIT_SIZE // 8
SIDES = ("left", "right")
MASKS, SOURCES, TARGETS = "masks", "sources", "targets"
TABLE, PROMPTS = "metadata.jsonl", "prompts.jsonl"
NUM_PROMPTS = 8

Picture = npt.NDArray[np.uint8]
"""Grey image [64,128] of two digits."""


@dataclass(frozen=True, slots=True)
class EditSet:
    """Settings of the images in one folder. No two sets have a digit image in common."""

    folder: str
    num_sources: int
    first: int  # the digit images of the set: first to end - 1 of `sft_split`
    end: int
    has_targets: bool = False


EDIT_SETS = (
    EditSet("sft", 3072, 0, 500, has_targets=True),
    EditSet("rl", 1024, 500, 749),
    EditSet("held_out", 128, 749, 899),
)


def write_digit_edits(out: Path) -> int:
    """Write the demo data and return the number of images for training. Raises DataError if `out` is not empty.

    * sft/: 3072 sources with edited images. A third of them are right, a third have both digits inverted, and a third
      are copies of the source, so that the SFT model follows the instruction only partly, and RL can improve it.
    * rl/: 1024 sources.
    * held_out/: 128 sources for evaluations.

    * prompts.jsonl: the first 8 held-out sources with their instructions.

    Each folder has a table metadata.jsonl. The mask of a source is white on the digit to invert. The metadata `label`
    is this digit, and `side` is left or right.
    """
    require_new_folder(out)
    digits = sft_split()
    for settings in EDIT_SETS:
        rows = write_edit_set(out / settings.folder, settings, digits)
    shown = rows[:NUM_PROMPTS]
    prompts = [{"prompt": row["prompt"], "source": f"{settings.folder}/{row['file_name']}"} for row in shown]
    write_json_rows(out / PROMPTS, prompts)
    return sum(settings.num_sources for settings in EDIT_SETS[:-1])


def write_edit_set(folder: Path, settings: EditSet, digits: DigitSplit) -> list[dict[str, Any]]:
    """Write the images and the table of a set. Returns the rows of the table."""
    images, labels = digits
    for name in (MASKS, SOURCES, *([TARGETS] if settings.has_targets else [])):
        (folder / name).mkdir(parents=True)
    for side in SIDES:
        save_image(folder / MASKS / f"{side}.png", np.where(half_mask(side), 255, 0).astype(np.uint8))
    rows = []
    for number in range(1, settings.num_sources + 1):
        generator = np.random.Generator(np.random.PCG64(derive_seed(0, "edits", settings.folder, number)))
        pair = generator.integers(settings.first, settings.end, 2)
        side = SIDES[int(generator.integers(2))]
        source, file = draw_pair(images[pair]), f"{number:04}.png"
        save_image(folder / SOURCES / file, source)
        row: dict[str, Any] = {
            "prompt": f"invert the {side} digit",
            "file_name": f"{SOURCES}/{file}",
            "mask": f"{MASKS}/{side}.png",
            "side": side,
            "label": int(labels[pair[SIDES.index(side)]]),
        }
        if settings.has_targets:
            save_image(folder / TARGETS / file, edit_image(source, side, number % 3))
            row |= {"file_name": f"{TARGETS}/{file}", "source": f"{SOURCES}/{file}"}
        rows.append(row)
    write_json_rows(folder / TABLE, rows)
    return rows


def draw_pair(digits: npt.NDArray[np.uint8]) -> Picture:
    """Draw two digits [2,8,8] side by side, and enlarge each pixel to CELL x CELL pixels."""
    return np.concatenate(list(digits), axis=1).repeat(CELL, axis=0).repeat(CELL, axis=1)


def edit_image(source: Picture, side: str, kind: int) -> Picture:
    """Return an edited image. kind 0: right. kind 1: both digits are inverted. kind 2: a copy of the source."""
    inverted = half_mask(side) if kind == 0 else np.full(source.shape, kind == 1)
    return np.where(inverted, 255 - source, source).astype(np.uint8)


def half_mask(side: str) -> npt.NDArray[np.bool_]:
    """Return True for the pixels [64,128] of the left or right digit."""
    mask = np.zeros((DIGIT_SIZE, len(SIDES) * DIGIT_SIZE), np.bool_)
    start = DIGIT_SIZE * SIDES.index(side)
    mask[:, start : start + DIGIT_SIZE] = True
    return mask


def save_image(path: Path, grey: Picture) -> None:
    Image.fromarray(grey).convert("RGB").save(path, compress_level=1)
