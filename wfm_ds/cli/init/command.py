"""The command `wfm init`: ask for missing options, then check and write the recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from wfm_ds.cli.init.questions import TASKS
from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(
        description="Write a recipe for your data and a model. On a terminal, it asks for missing options.",
        epilog="Example: %(prog)s --data my_pictures --model tiny:sd3 --out mine.yaml",
    )
    p.add_argument("--data", help="folder that wfm data can read, file of prompts, preference pairs or conversations")
    p.add_argument("--model", help="a model folder, owner/name on the Hub, or tiny:FAMILY")
    p.add_argument("--task", choices=list(TASKS), help="what to train (default: what fits the data)")
    p.add_argument("--rl", metavar="REWARD", help="RL with this reward (see wfm rewards)")
    p.add_argument("--held-out", metavar="REWARD", help="reward to watch but not to train on, or none")
    weights = p.add_mutually_exclusive_group()
    weights.add_argument("--lora", action="store_true", help="train a LoRA (default, except for actions)")
    weights.add_argument("--full", action="store_true", help="train all weights instead of a LoRA")
    p.add_argument("--prompt", help="caption for files without one")
    p.add_argument("--media-path", metavar="DIR", help="folder of the images and videos of conversations")
    p.add_argument("--out", type=Path, help="recipe file to write (default mine.yaml)")
    p.add_argument("--force", action="store_true", help="overwrite an existing file")
    p.add_argument("-y", "--yes", action="store_true", help="ask nothing: use the default of each missing option")
    p.key_options = {"model.path": "--model", "data.prompt": "--prompt", "data.path": "--data"}
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.cli.init.dialog import run_dialog

    run_dialog(args)
