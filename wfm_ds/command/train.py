"""`wfm train`: the line of the `deepspeed` command that a recipe needs, started by launch.py with little said by it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from wfm_ds import __version__
from wfm_ds.errors import UserError
from wfm_ds.program import Parser

ALL = "all"


def parser() -> Parser:
    p = Parser(
        prog="wfm train",
        description="Post-train a diffusers pipeline as a recipe says, a process for each GPU.",
        epilog="Example: %(prog)s tiny/sd3_nft run.steps=4 --gpus 2",
    )
    p.add_argument("recipe", type=Path, help="a YAML recipe, or the name of a shipped one (wfm recipes)")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    p.add_argument("--gpus", type=gpus, default=ALL, metavar="N|all", help="of each machine (default: all; CPU: 1)")
    p.add_argument("--hostfile", type=Path, metavar="F", help="run on the machines named in it (docs/multi-node.md)")
    p.add_argument("--nodes", type=at_least_one, metavar="N", help="only so many machines of the hostfile")
    p.add_argument("--overwrite", action="store_true", help="replace a run that is in the output folder already")
    p.add_argument("--dry-run", action="store_true", help="print the deepspeed line, start nothing")
    p.add_argument("-v", "--verbose", action="store_true", help="show what DeepSpeed's launcher says")
    return p


def gpus(text: str) -> str:
    if text != ALL:
        at_least_one(text)
    return text


def at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from wfm_ds import launch
    from wfm_ds.recipe import file as recipe_file

    recipe_file.load(args.recipe, args.overrides)  # a mistake in it is said before anything is started
    line = launcher_words(args)
    if args.dry_run:
        sys.stdout.write(f"{shlex.join(['deepspeed', *line])}\n")
        return 0
    sys.stderr.write(f"wfm_ds {__version__}: starting {args.recipe}\n")
    return launch.run(line)


def launcher_words(args: argparse.Namespace) -> list[str]:
    """The words behind `deepspeed`, as they work with the stock command too. Raises UserError."""
    if args.nodes is not None and args.hostfile is None:
        raise UserError("--nodes: name the machines by --hostfile")
    if args.hostfile is not None and not args.hostfile.is_file():
        raise UserError(f"--hostfile: there is no file {args.hostfile}")
    words = [] if args.verbose else ["--quiet"]
    if args.hostfile is not None:
        words += ["--hostfile", str(args.hostfile)]
    if args.nodes is not None:
        words += ["--num_nodes", str(args.nodes)]
    number = "1" if args.gpus == ALL and args.hostfile is None and not has_gpus() else args.gpus
    if number != ALL:
        words += ["--num_gpus", number]
    words += ["--module", "wfm_ds.train", str(args.recipe), *args.overrides]
    return [*words, *(["--overwrite"] if args.overwrite else [])]


def has_gpus() -> bool:
    """Return whether the launcher would count any."""
    from wfm_ds.distributed.accelerator import accelerator_present

    return accelerator_present() and os.environ.get("DS_ACCELERATOR") != "cpu"
