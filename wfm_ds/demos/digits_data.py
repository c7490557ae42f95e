"""`wfm data digits OUT_DIR`: write the digits demo of the quickstart, 8x8 digits from scikit-learn.

Source: the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from wfm_ds.demos.files import data_parser, require_new_folder, write_json_rows

DigitSplit = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Grey images [N,8,8] and their digits [N]."""


def sft_split() -> DigitSplit:
    images, labels = all_digits()
    return images[::2], labels[::2]


def reward_split() -> DigitSplit:
    """Return the images with odd indices, to which the classifier of the `digits` reward is fitted."""
    images, labels = all_digits()
    return images[1::2], labels[1::2]


def all_digits() -> DigitSplit:
    """Return all 1797 images, with grey levels 0..16 rescaled to 0..255."""
    from sklearn.datasets import load_digits  # slow import, not needed for --help

    digits = load_digits()
    return np.rint(digits.images * 255 / 16).astype(np.uint8), digits.target.astype(np.int64)


def digit_caption(digit: int) -> dict[str, str | int]:
    return {"prompt": f"the digit {digit}", "label": digit}


def preference_pair(number: int, labels: npt.NDArray[np.int64]) -> dict[str, str | int]:
    other_digits = np.flatnonzero(np.roll(labels, -number) != labels[number])
    files = [f"images/{index % len(labels) + 1:04}.png" for index in (number, number + int(other_digits[0]))]
    return {**digit_caption(int(labels[number])), "chosen": files[0], "rejected": files[1]}


def write_digits(out: Path) -> int:
    """Write the demo data and return the number of images. Raises DataError if `out` is not empty.

    * images/: 899 images NNNN.png with .json captions.
    * prompts/train.jsonl: 10 prompts.
    * pairs.jsonl: one preference pair per image.
    """
    require_new_folder(out)
    images, labels = sft_split()
    (out / "images").mkdir(parents=True)
    (out / "prompts").mkdir()
    for number, (image, label) in enumerate(zip(images, labels, strict=True), start=1):
        Image.fromarray(image).convert("RGB").save(out / "images" / f"{number:04}.png", optimize=False)
        write_json_rows(out / "images" / f"{number:04}.json", [digit_caption(int(label))])
    write_json_rows(out / "pairs.jsonl", (preference_pair(number, labels) for number in range(len(labels))))
    write_json_rows(out / "prompts" / "train.jsonl", map(digit_caption, range(10)))
    return len(images)


parser = partial(
    data_parser,
    "Write the data of the digits demo (quickstart).",
    "new or empty folder for images/ (SFT), pairs.jsonl (DPO) and prompts/ (RL)",
)


def run(args: argparse.Namespace) -> None:
    out = args.out_dir
    count = write_digits(out)
    sys.stdout.write(f"{count} captioned images in {out / 'images'}, 10 prompts in {out / 'prompts' / 'train.jsonl'}\n")
