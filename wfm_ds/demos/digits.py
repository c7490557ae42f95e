"""The digits demo: images of 8 x 8 pixels, rewarded if a classifier recognizes the digit in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wfm_ds.demos.base import Demo, comparison_table, load_evaluations
from wfm_ds.demos.digits_data import digit_caption, write_digits
from wfm_ds.storage.json_lines import read_json_rows

GRID_ROWS, GRID_COLUMNS = 4, 10
SCALE = 8  # enlarges 8 x 8 pixels to 64 x 64
GREEN, RED = (26, 127, 55), (207, 34, 46)
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
    write_data = staticmethod(write_digits)
    curves = METRICS

    def write_comparison(self, folder: Path, run: Path) -> list[str]:
        results = load_evaluations(run, REWARD)
        stds = []
        for (samples_folder, _), name in ((results[0], "before"), (results[-1], "after")):
            samples = load_samples(samples_folder)
            write_readings(folder / f"{name}.png", samples[: GRID_ROWS * GRID_COLUMNS])
            stds.append(std_within_prompts(samples))
        before, after = results[0][1], results[-1][1]
        rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items() if tag in before]
        rows.append(("diversity: std between images of one prompt", stds[0], stds[1]))
        image_paths = (
            f"Images: {folder / 'before.png'} and {folder / 'after.png'}, one column for each digit. "
            "Below each image: what the classifier of the reward reads, green if it is the digit in the prompt."
        )
        return [*comparison_table("on held-out noise seeds, 200 images", rows), "", image_paths]

    def generate_arguments(self, folder: Path) -> str:
        return (
            f"--prompts {folder / 'data' / 'prompts' / 'train.jsonl'} --height 8 --width 8 --steps 12 "
            f"--seeds 1 2 3 4 5 6 7 8 --batch 80 --out {folder / 'more'}"
        )


def load_samples(folder: Path) -> list[tuple[npt.NDArray[np.uint8], str]]:
    """Return (image [H,W,3], prompt) of each sample, in the order of samples.jsonl."""
    from PIL import Image

    entries = list(read_json_rows(folder / "samples.jsonl"))
    return [(np.asarray(Image.open(folder / e["file"]).convert("RGB")), e["prompt"]) for e in entries]


def write_readings(path: Path, samples: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> None:
    """Write a PNG of the samples. Below each sample is the digit that the reward's classifier reads, green if correct.

    samples: (image [H,W,3], prompt) in rows of GRID_COLUMNS.
    """
    from wfm_ds.monitoring.media_files import image_grid, save_png
    from wfm_reward.rewards.digits import DigitsReward

    reward = DigitsReward()
    reward.load()
    readings = [reward.read_digit(image) for image, _ in samples]
    prompts = [digit_caption(reading)["prompt"] for reading in readings]
    colors = [GREEN if prompt == read else RED for read, (_, prompt) in zip(prompts, samples, strict=True)]
    grid = image_grid(
        [image for image, _ in samples],
        GRID_COLUMNS,
        scale=SCALE,
        labels=[f"reads {reading}" for reading in readings],
        label_colors=colors,
    )
    save_png(path, grid)


def std_within_prompts(samples: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> float:
    """Return a pixel's standard deviation (0 to 1) over the images of a prompt, averaged over pixels and prompts."""
    by_prompt: dict[str, list[npt.NDArray[np.uint8]]] = {}
    for image, prompt in samples:
        by_prompt.setdefault(prompt, []).append(image)
    return float(np.mean([(np.stack(images) / 255.0).std(axis=0).mean() for images in by_prompt.values()]))
