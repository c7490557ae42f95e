"""`python -m wfm_ds.quickstart`: digits drawn from nothing by SFT, then improved by DiffusionNFT, and the result shown.

Both runs are the ordinary command on the recipes in recipes/digits/; this file only prepares their inputs and reads
what they left behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import UserError
from wfm_ds.program import Parser, program
from wfm_ds.recipe import shipped

MARKER = "QUICKSTART"
GRID_ROWS, GRID_COLUMNS = 8, 10
METRICS = {
    "reward (the classifier that RL is rewarded by)": "val/reward/digits/mean",
    "second judge (a classifier that RL never sees)": "val/reward/digits/second_judge/mean",
}


def main(argv: Sequence[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> Parser:
    p = Parser(prog="python -m wfm_ds.quickstart", description=__doc__.split("\n")[0])
    p.add_argument("--output", type=Path, default=Path("outputs/quickstart"), help="replaced if a quickstart made it")
    p.add_argument("--seed", type=int, default=0, help="run.seed of both runs")
    p.add_argument("--control", action="store_true", help="shuffle the rewards: RL must not gain")
    return p


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    prepare(args.output)
    before_rl = train(
        "sft.yaml",
        f"run.output_dir={args.output / 'sft'}",
        f"run.seed={args.seed}",
        f"model.path={args.output / 'model'}",
        f"data.path={args.output / 'data' / 'images'}",
    )
    train(
        "nft.yaml",
        f"run.output_dir={args.output / 'nft'}",
        f"run.seed={args.seed}",
        f"model.path={before_rl['artifacts']['pipeline']}",
        f"data.path={args.output / 'data' / 'prompts'}",
        f"reward.shuffle={str(args.control).lower()}",
    )
    show(args.output, seconds=time.monotonic() - began)


def prepare(folder: Path) -> None:
    """The digits as a paired folder and a prompt file, and the untrained pipeline."""
    from wfm_ds.data.digits import write_digits
    from wfm_ds.models.tiny import write_tiny

    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UserError(f"{folder} holds something else: choose an empty folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(
        "Made by python -m wfm_ds.quickstart, which replaces this folder when it runs again.\n"
    )
    say("preparing the digits and an untrained model")
    write_digits(folder / "data")
    write_tiny("digits", folder / "model")


def train(recipe: str, *overrides: str) -> dict[str, Any]:
    """The command of README.md on a recipe; its result.json. Exits with the command's code when it fails."""
    command = [
        "deepspeed",
        "--num_gpus",
        str(num_ranks()),
        "-m",
        "wfm_ds.train",
        str(shipped.require(f"digits/{recipe}")),
    ]
    say(" ".join([*command, *overrides]))
    code = subprocess.run(
        [sys.executable, "-m", "wfm_ds.launch", *command[1:], *overrides], stdin=subprocess.DEVNULL
    ).returncode
    if code:
        sys.exit(code)
    folder = Path(overrides[0].removeprefix("run.output_dir="))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def num_ranks() -> int:
    """Two, on a CPU too; on a machine with a single GPU one."""
    import torch

    from wfm_ds.distributed.accelerator import uses_cuda

    return min(2, torch.cuda.device_count()) if uses_cuda() else 2


def show(folder: Path, *, seconds: float) -> None:
    """Print the table and the loading lines; write report.md, before.png and after.png."""
    from wfm_ds.checkpoint.export import loading_lines
    from wfm_ds.monitoring.pictures import grid, save_png

    run = folder / "nft"
    before, after = first_and_last(run / "metrics.jsonl")
    steps = sorted(int(f.name.removeprefix("step_")) for f in (run / "samples").iterdir())
    spreads = []
    for step, name in ((steps[0], "before"), (steps[-1], "after")):
        samples = load_samples(run / "samples" / f"step_{step}")
        images = [image for image, _ in samples[: GRID_ROWS * GRID_COLUMNS]]
        save_png(folder / f"{name}.png", grid(images, GRID_COLUMNS, scale=6))
        spreads.append(spread_within_prompts(samples))
    result = json.loads((run / "result.json").read_text())
    rows = [(label, before[tag], after[tag]) for label, tag in METRICS.items() if tag in before]
    table = [
        "| on held-out noise seeds, 200 images | before RL | after RL |",
        "|---|---|---|",
        *(f"| {label} | {b:.3f} | {a:.3f} |" for label, b, a in rows),
        f"| spread: std between images of one prompt | {spreads[0]:.3f} | {spreads[1]:.3f} |",
    ]
    base, lora = sft_pipeline(run), result["artifacts"]["lora"]
    report = "\n".join(
        [
            *table,
            "",
            f"Pictures: {folder / 'before.png'} and {folder / 'after.png'}. All of it took {seconds:.0f} s.",
            f"Curves: tensorboard --logdir {folder}",
            "",
            "Load the result with plain diffusers:",
            "",
            *(f"    {line}" for line in loading_lines(Path(base), Path(lora), lora=True).splitlines()),
            "",
            "Draw more with it, as a page of pictures:",
            "",
            f"    python -m wfm_ds.generate --model {base} --lora {lora} \\",
            f"        --prompts {folder / 'data' / 'prompts' / 'train.jsonl'} --height 8 --width 8 --steps 12 \\",
            f"        --seeds 1 2 3 4 5 6 7 8 --batch 80 --out {folder / 'more'}",
        ]
    )
    (folder / "report.md").write_text(report + "\n")
    say(report)


def sft_pipeline(run: Path) -> str:
    """The pipeline folder that the RL run started from, as its resolved recipe names it."""
    from wfm_ds.recipe.file import load

    return load(run / "recipe.yaml").model.path


def first_and_last(metrics: Path) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The evaluations before the first and after the last step."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [r for r in records if "val/reward/digits/mean" in r]
    return evaluations[0], evaluations[-1]


def load_samples(folder: Path) -> list[tuple[npt.NDArray[np.uint8], str]]:
    """Images with their prompts, in the order of samples.jsonl."""
    from PIL import Image

    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [(np.asarray(Image.open(folder / e["file"]).convert("RGB")), e["prompt"]) for e in entries]


def spread_within_prompts(samples: Sequence[tuple[npt.NDArray[np.uint8], str]]) -> float:
    """Standard deviation between the images of a prompt, over pixels in [0, 1], averaged over pixels and prompts."""
    by_prompt: dict[str, list[npt.NDArray[np.uint8]]] = {}
    for image, prompt in samples:
        by_prompt.setdefault(prompt, []).append(image)
    return float(np.mean([(np.stack(images) / 255.0).std(axis=0).mean() for images in by_prompt.values()]))


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
