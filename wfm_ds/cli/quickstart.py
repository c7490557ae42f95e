"""`wfm quickstart`: train a small model from scratch by SFT, improve it by DiffusionNFT, and report the result.

Both runs use the ordinary training command with the demo's recipes in recipes/.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wfm_ds.demos.base import Demo, find_sft_pipeline
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser, run_command
from wfm_ds.recipe import shipped_recipes

MARKER_FILE = "QUICKSTART"
DEMOS = ("digits", "shapes", "actions")
OLD_NAMES = {
    "digits": "digits",
    "moving": "shapes",
    "world": "actions",
}  # {value of --world, the old name of --demo: demo}


def main(argv: list[str] | None = None) -> int:
    return run_command(parser(), run, argv)


def parser() -> CommandParser:
    p = CommandParser(prog="wfm quickstart", description=" ".join(__doc__.split("\n\n")[0].split()))
    p.add_argument(
        "--demo",
        choices=DEMOS,
        default=DEMOS[0],
        help="handwritten digits (default), videos of moving shapes, or videos that follow actions",
    )
    p.add_argument("--world", dest="demo", type=parse_old_name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    p.add_argument(
        "--output",
        type=Path,
        help="output folder; replaced if a quickstart has written it (default outputs/quickstart, -video or -world)",
    )
    p.add_argument("--seed", type=int, default=0, help="run.seed of both runs")
    p.add_argument("--rl", default="nft", metavar="RECIPE", help="RL recipe of the demo (default %(default)s)")
    p.add_argument(
        "--control", action="store_true", help="control experiment: shuffle the rewards, RL must not improve"
    )
    return p


def parse_old_name(text: str) -> str:
    if text not in OLD_NAMES:
        raise argparse.ArgumentTypeError(f"invalid choice {text!r}; choose --demo {', '.join(DEMOS)}")
    return OLD_NAMES[text]


def run(args: argparse.Namespace) -> None:
    start_s, demo = time.monotonic(), load_demo(args.demo)
    output: Path = args.output or demo.output
    shipped_recipes.require_recipe(f"{demo.name}/{args.rl}")
    prepare_folder(demo, output)
    sft_result = run_sft(demo, output, output / "sft", args.seed)
    folder = output / args.rl
    run_rl(demo, output, folder, sft_result, args.seed, f"reward.shuffle={str(args.control).lower()}")
    write_report(demo, output, folder, seconds=time.monotonic() - start_s)


def load_demo(name: str) -> Demo:
    """Return the demo with this name (see DEMOS) and import its optional packages."""
    if name == "digits":
        from wfm_ds.demos.digits import DigitsDemo

        return DigitsDemo()
    if name == "actions":
        from wfm_ds.demos.actions import ActionsDemo

        return ActionsDemo()
    from wfm_ds.demos.shapes import ShapesDemo

    return ShapesDemo()


def prepare_folder(demo: Demo, folder: Path) -> None:
    """Write the demo's data and untrained pipeline. Raises UserError if the folder has other files."""
    from wfm_ds.models.tiny import write_tiny_model

    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER_FILE).exists():
        raise UserError(f"{folder} was not written by a quickstart: choose an empty folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER_FILE).write_text("Written by wfm quickstart, which replaces this folder when it runs again.\n")
    print_text(f"preparing the data ({demo.description}) and an untrained model")
    demo.write_data(folder / "data")
    write_tiny_model(demo.name, folder / "model")


def run_sft(demo: Demo, folder: Path, out: Path, seed: int, *overrides: str) -> Mapping[str, Any]:
    """Train the demo's model by SFT from random weights, and return the run's result.json.

    folder: folder written by `prepare_folder`. out: output folder of the run.
    """
    return run_training(
        f"{demo.name}/sft",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'data' / demo.sft_data}",
        *demo.sft_overrides(folder),
        *overrides,
    )


def run_rl(
    demo: Demo, folder: Path, out: Path, sft_result: Mapping[str, Any], seed: int, *overrides: str
) -> Mapping[str, Any]:
    """Train the SFT model by RL, and return the run's result.json. The name of `out` selects the demo's recipe.

    folder: folder written by `prepare_folder`. out: output folder of the run. sft_result: result.json of the SFT run.
    """
    return run_training(
        f"{demo.name}/{out.name}",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={sft_result['artifacts']['pipeline']}",
        f"data.path={folder / 'data' / demo.rl_data}",
        *demo.rl_overrides(folder),
        *overrides,
    )


def run_training(recipe: str, *overrides: str) -> Mapping[str, Any]:
    """Train a shipped recipe in a separate process and return the run's result.json.

    Exits with the exit code of the process if it fails. overrides: the first one must set run.output_dir.
    """
    command = [
        "deepspeed",
        "--num_gpus",
        str(num_ranks()),
        "-m",
        "wfm_ds.train",
        str(shipped_recipes.require_recipe(recipe)),
    ]
    print_text(" ".join([*command, *overrides]))
    code = subprocess.run(
        [sys.executable, "-m", "wfm_ds.launch", *command[1:], *overrides], stdin=subprocess.DEVNULL
    ).returncode
    if code:
        sys.exit(code)
    folder = Path(overrides[0].removeprefix("run.output_dir="))
    result: Mapping[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def num_ranks() -> int:
    """Return the number of training ranks: 1 with a single GPU, otherwise 2 (also on CPU)."""
    import torch

    from wfm_ds.distributed.accelerator import uses_cuda

    return min(2, torch.cuda.device_count()) if uses_cuda() else 2


def write_report(demo: Demo, folder: Path, run: Path, *, seconds: float) -> None:
    """Write comparison images and report.md into `folder`, and print the report. run: output folder of the RL run."""
    from wfm_ds.export.weights import loading_lines

    base, artifacts = find_sft_pipeline(run), json.loads((run / "result.json").read_text())["artifacts"]
    is_lora, export = "lora" in artifacts, Path(artifacts.get("lora") or artifacts["pipeline"])
    model_options = f"--model {base} --lora {export}" if is_lora else f"--pipeline {export}"
    comparison = demo.write_comparison(folder, run)
    report = "\n".join(
        [
            *comparison,
            f"Total time: {seconds:.0f} s.",
            f"Curves: tensorboard --logdir {folder}",
            "",
            "Load the result with diffusers:",
            "",
            *(f"    {line}" for line in loading_lines(Path(base), export, lora=is_lora).splitlines()),
            "",
            "Generate more samples, with a page to view them:",
            "",
            f"    wfm generate {model_options} \\",
            f"        {demo.generate_arguments(folder)}",
        ]
    )
    (folder / "report.md").write_text(report + "\n")
    print_text(report)


def print_text(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()
