"""`python -m wfm_ds.quickstart`: a small world drawn from nothing by SFT, then improved by DiffusionNFT, and the result
shown.

Both runs are the ordinary command on the recipes of recipes/WORLD/; this file only prepares their inputs and reads
what they left behind.
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

from wfm_ds.errors import UserError
from wfm_ds.program import Parser, program
from wfm_ds.quickstart.world import World, sft_pipeline
from wfm_ds.recipe import shipped

MARKER = "QUICKSTART"
WORLDS = ("digits", "moving", "world")


def main(argv: list[str] | None = None) -> int:
    return program(parser(), run, argv)


def parser() -> Parser:
    p = Parser(prog="python -m wfm_ds.quickstart", description=" ".join(__doc__.split("\n\n")[0].split()))
    p.add_argument(
        "--world",
        choices=WORLDS,
        default=WORLDS[0],
        help="handwritten digits, videos of moving shapes, or a wall that follows actions",
    )
    p.add_argument("--output", type=Path, help="replaced if a quickstart made it (outputs/quickstart, -video, -world)")
    p.add_argument("--seed", type=int, default=0, help="run.seed of both runs")
    p.add_argument("--rl", default="nft", metavar="RECIPE", help="the second recipe of recipes/WORLD/ (nft)")
    p.add_argument("--control", action="store_true", help="shuffle the rewards: RL must not gain")
    return p


def run(args: argparse.Namespace) -> None:
    began, world = time.monotonic(), world_of(args.world)
    output: Path = args.output or world.output
    shipped.require(f"{world.name}/{args.rl}")
    prepare(world, output)
    start = train_start(world, output, output / "sft", args.seed)
    folder = output / args.rl
    improve(world, output, folder, start, args.seed, f"reward.shuffle={str(args.control).lower()}")
    show(world, output, folder, seconds=time.monotonic() - began)


def world_of(name: str) -> World:
    """The world of one of the names of WORLDS. Imports what its data needs."""
    if name == "digits":
        from wfm_ds.quickstart.digits import Digits

        return Digits()
    if name == "world":
        from wfm_ds.quickstart.brightness import Brightness

        return Brightness()
    from wfm_ds.quickstart.moving import MovingShapes

    return MovingShapes()


def prepare(world: World, folder: Path) -> None:
    """The data as a paired folder and a prompt file, and the untrained pipeline."""
    from wfm_ds.models.tiny import write_tiny

    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UserError(f"{folder} holds something else: choose an empty folder with --output")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(
        "Made by python -m wfm_ds.quickstart, which replaces this folder when it runs again.\n"
    )
    say(f"preparing {world.what} and an untrained model")
    world.write(folder / "data")
    write_tiny(world.name, folder / "model")


def train_start(world: World, folder: Path, out: Path, seed: int, *overrides: str) -> Mapping[str, Any]:
    """Train the world's model by SFT from random weights, with what `prepare` left in the folder; its result.json."""
    return train(
        f"{world.name}/sft",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'data' / world.media}",
        *world.sft_overrides(folder),
        *overrides,
    )


def improve(
    world: World, folder: Path, out: Path, start: Mapping[str, Any], seed: int, *overrides: str
) -> Mapping[str, Any]:
    """Train what SFT left, as its result.json `start` says, by the recipe that the folder `out` is named after; its
    result.json."""
    return train(
        f"{world.name}/{out.name}",
        f"run.output_dir={out}",
        f"run.seed={seed}",
        f"model.path={start['artifacts']['pipeline']}",
        f"data.path={folder / 'data' / world.asked}",
        *world.rl_overrides(folder),
        *overrides,
    )


def train(recipe: str, *overrides: str) -> Mapping[str, Any]:
    """The command of README.md on a recipe; its result.json. Exits with the command's code when it fails."""
    command = ["deepspeed", "--num_gpus", str(num_ranks()), "-m", "wfm_ds.train", str(shipped.require(recipe))]
    say(" ".join([*command, *overrides]))
    code = subprocess.run(
        [sys.executable, "-m", "wfm_ds.launch", *command[1:], *overrides], stdin=subprocess.DEVNULL
    ).returncode
    if code:
        sys.exit(code)
    folder = Path(overrides[0].removeprefix("run.output_dir="))
    result: Mapping[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def num_ranks() -> int:
    """Two, on a CPU too; on a machine with a single GPU one."""
    import torch

    from wfm_ds.distributed.accelerator import uses_cuda

    return min(2, torch.cuda.device_count()) if uses_cuda() else 2


def show(world: World, folder: Path, run: Path, *, seconds: float) -> None:
    """Write the pictures and report.md, and print it: the table and the lines that load the result."""
    from wfm_ds.checkpoint.export import loading_lines

    base, artifacts = sft_pipeline(run), json.loads((run / "result.json").read_text())["artifacts"]
    lora, made = "lora" in artifacts, Path(artifacts.get("lora") or artifacts["pipeline"])
    compared = world.show(folder, run)
    report = "\n".join(
        [
            *compared,
            f"All of it took {seconds:.0f} s.",
            f"Curves: tensorboard --logdir {folder}",
            "",
            "Load the result with plain diffusers:",
            "",
            *(f"    {line}" for line in loading_lines(Path(base), made, lora=lora).splitlines()),
            "",
            "Draw more with it, as a page of pictures:",
            "",
            f"    python -m wfm_ds.generate {f'--model {base} --lora {made}' if lora else f'--pipeline {made}'} \\",
            f"        {world.more(folder)}",
        ]
    )
    (folder / "report.md").write_text(report + "\n")
    say(report)


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()
