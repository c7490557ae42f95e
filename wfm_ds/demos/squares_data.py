"""Coloured squares: `wfm data squares OUT_DIR` for vision-language models, and edits for tiny recipes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from wfm_ds.demos.files import data_parser, require_new_folder, write_json_rows

Colour = tuple[int, int, int]
COLOURS: Mapping[str, Colour] = MappingProxyType(
    {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (30, 60, 220), "yellow": (230, 210, 30)}
)
GREY, BLACK, WHITE = (128, 128, 128), (0, 0, 0), (255, 255, 255)
SIDE = 56  # of an image, in pixels
NUM_IMAGES, NUM_EDITS = 40, 24


def draw_square(number: int, colour: Colour, background: Colour = GREY) -> Image.Image:
    pixels = np.full((SIDE, SIDE, 3), background, np.uint8)
    size, offset = 20 + number * 7 % 16, number * 5 % 20
    pixels[offset : offset + size, offset : offset + size] = colour
    return Image.fromarray(pixels)


def annotation_row(number: int, names: Sequence[str]) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": "<image>\nthe square is"},
        {"from": "gpt", "value": f"{names[number]} square"},
    ]
    images = [f"images/{number:03}.png"]
    if number % 4 == 0:
        other = (number + 1) % len(names)
        images.append(f"images/{other:03}.png")
        turns += [
            {"from": "human", "value": "and <image> is"},
            {"from": "gpt", "value": f"{names[other]} square"},
        ]
    return {"id": f"{number:03}", "image": images, "conversations": turns}


def write_squares(out: Path) -> int:
    """Write images and annotations.json, and return the number of images. Raises DataError if `out` is not empty."""
    require_new_folder(out)
    (out / "images").mkdir(parents=True)
    colours = list(COLOURS)
    names = [colours[number % len(colours)] for number in range(NUM_IMAGES)]
    for number, name in enumerate(names):
        draw_square(number, COLOURS[name]).save(out / "images" / f"{number:03}.png")
    rows = [annotation_row(number, names) for number in range(NUM_IMAGES)]
    (out / "annotations.json").write_text(json.dumps(rows, indent=1) + "\n")
    return NUM_IMAGES


def write_edits(out: Path) -> int:
    """Write edits of coloured squares, such as "paint the square red", and return their number.

    Folders: source, source_2 (a square of the wanted colour), source_3 (the background), mask, target and rejected
    (another colour). Tables: metadata.jsonl, and pairs.jsonl with preference pairs.
    """
    rows, pairs = [], []
    for number in range(NUM_EDITS):
        before, after, other = (list(COLOURS)[(number + shift) % len(COLOURS)] for shift in (0, 1 + number % 2, 3))
        name, prompt = f"{number:03}", f"paint the square {after}"
        images = {
            "source": draw_square(number, COLOURS[before]),
            "source_2": draw_square(0, COLOURS[after]),
            "source_3": draw_square(number, GREY),
            "mask": draw_square(number, WHITE, BLACK),
            "target": draw_square(number, COLOURS[after]),
            "rejected": draw_square(number, COLOURS[other]),
        }
        for folder, image in images.items():
            (out / folder).mkdir(parents=True, exist_ok=True)
            image.save(out / folder / f"{name}.png")
        files = {folder: f"{folder}/{name}.png" for folder in images}
        target, rejected = files.pop("target"), files.pop("rejected")
        rows.append({"file_name": target, "prompt": prompt, **files})
        pairs.append({"prompt": prompt, "chosen": target, "rejected": rejected, **files})
    write_json_rows(out / "metadata.jsonl", rows)
    write_json_rows(out / "pairs.jsonl", pairs)
    return NUM_EDITS


parser = partial(
    data_parser,
    "Write the data of the squares demo: questions about coloured squares.",
    "new or empty folder for images/ and annotations.json",
)


def run(args: argparse.Namespace) -> None:
    count = write_squares(args.out_dir)
    sys.stdout.write(
        f"{count} images in {args.out_dir / 'images'}, conversations in {args.out_dir / 'annotations.json'}\n"
    )
