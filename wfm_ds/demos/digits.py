"""The digits demo: images of 8 x 8 pixels, rewarded if a classifier recognizes the digit in the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wfm_ds.demos.base import Demo, comparison_table, load_evaluations
from wfm_ds.demos.digits_data import write_digits

GRID_ROWS, GRID_COLUMNS = 8, 10
REWARD = "val/reward/digits/mean"
METRICS = {
    "reward (the classifier used by RL)": REWARD,
    "second classifier (not used by RL)": "val/reward/digits/second_judge/mean",
}


class DigitsDemo(Demo):
    name = "digits"
    description = "handwritten digits"
    sft_data = "images"
    output = Path("outputs/quickstart")

    def write_data(self, out: Path) -> int:
        return write_digits(out)

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        from wfm_ds.monitoring.images import image_grid, save_png

        results = load_evaluations(run, REWARD)
        stds = []
        for (samples_folder, _), name in ((results[0], "before"), (results[-1], "after")):
            samples = load_samples(samples_folder)
            images = [image for image, _ in samples[: GRID_ROWS * GRID_COLUMNS]]
            save_png(folder / f"{name}.png", image_grid(images, GRID_COLUMNS, scale=6))
            stds.append(std_within_prompts(samples))
        before, after = results[0][1], results[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items() if tag in before]
        rows.append(("diversity: std between images of one prompt", stds[0], stds[1]))
        image_paths = f"Images: {folder / 'before.png'} and {folder / 'after.png'}."
        return [*comparison_table("on held-out noise seeds, 200 images", rows), "", image_paths]

    def generate_arguments(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / 'prompts' / 'train.jsonl'} --height 8 --width 8 --steps 12 "
            f"--seeds 1 2 3 4 5 6 7 8 --batch 80 --out {folder / 'more'}"
        )


def load_samples(folder: Path) -> list[tuple[npt.NDArray[np.uint8], str]]:
    """Return (image [H,W,3], prompt) of each sample, in the order of samples.jsonl."""
    from PIL import Image

    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(np.asarray(Image.open(folder / e["file"]).convert("RGB")), e["prompt"]) for e in entries]


def std_within_prompts(samples: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> float:
    """Return the standard deviation of pixels, in [0, 1], over the images of a prompt.

    The standard deviation is averaged over all pixels and prompts.
    """
    by_prompt: dict[str, list[npt.NDArray[np.uint8]]] = {}
    for image, prompt in samples:
        by_prompt.setdefault(prompt, []).append(image)
    return float(np.mean([(np.stack(images) / 255.0).std(axis=0).mean() for images in by_prompt.values()]))
