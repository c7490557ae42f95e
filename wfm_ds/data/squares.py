"""`python -m wfm_ds.data.squares OUT_DIR`: questions about coloured squares, to try a vision-language model on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from wfm_ds.data.written import require_new
from wfm_ds.program import program

COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (30, 60, 220), "yellow": (230, 210, 30)}
)
SIDE = 56  # of an image, in pixels
NUM_IMAGES = 40


def picture(number: int, colour: tuple[int, int, int]) -> Image.Image:
    """A square of this colour on grey, at a place and of a size that follow from the number."""
    pixels = np.full((SIDE, SIDE, 3), 128, np.uint8)
    size, place = 20 + number * 7 % 16, number * 5 % 20
    pixels[place : place + size, place : place + size] = colour
    return Image.fromarray(pixels)


def row(number: int, names: Sequence[str]) -> dict[str, Any]:
    """A LLaVA row about image `number`, of one question; every fourth has a second, about the next image too."""
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
    """Write images/NNN.png and annotations.json; return the number of images. The same bytes on every run.

    Raises DataError if the folder exists and is not empty.
    """
    require_new(out)
    (out / "images").mkdir(parents=True)
    known = list(COLOURS)
    names = [known[number % len(known)] for number in range(NUM_IMAGES)]
    for number, name in enumerate(names):
        picture(number, COLOURS[name]).save(out / "images" / f"{number:03}.png")
    rows = [row(number, names) for number in range(NUM_IMAGES)]
    (out / "annotations.json").write_text(json.dumps(rows, indent=1) + "\n")
    return NUM_IMAGES


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="wfm_ds.data.squares", description="Write questions about coloured squares.")
    p.add_argument("out_dir", type=Path, help="a new or empty folder; gets images/ and annotations.json")
    return p


def run(args: argparse.Namespace) -> None:
    count = write_squares(args.out_dir)
    sys.stdout.write(f"{count} images, and conversations about them in {args.out_dir / 'annotations.json'}\n")


if __name__ == "__main__":
    sys.exit(main())
