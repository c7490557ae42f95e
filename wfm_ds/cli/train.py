"""`wfm train`: build the `deepspeed` command line for a recipe and run it with reduced launcher output."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from wfm_ds import __version__
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

ALL = "all"


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm train",
        description="Train a recipe with one process per GPU.",
        epilog="Example: %(prog)s sd3_nft --tiny run.steps=4 --gpus 2",
    )
    p.add_recipe_arguments()
    p.add_argument(
        "--gpus", type=parse_gpus, default=ALL, metavar="N|all", help="GPUs per machine (default: all; CPU: 1 process)"
    )
    p.add_argument("--hostfile", type=Path, metavar="F", help="run on the machines in this file (docs/multi-node.md)")
    p.add_argument(
        "--nodes", type=parse_positive_int, metavar="N", help="use only the first N machines of the hostfile"
    )
    p.add_argument(
        "--tiny", action="store_true", help="two steps on a CPU, with a tiny random model and built-in data and rewards"
    )
    p.add_argument("--overwrite", action="store_true", help="replace an existing run in the output folder")
    p.add_argument("--dry-run", action="store_true", help="print the deepspeed command and exit")
    p.add_argument("-v", "--verbose", action="store_true", help="show the output of the DeepSpeed launcher")
    return p


def parse_gpus(text: str) -> str:
    if text != ALL:
        parse_positive_int(text)
    return text


def parse_positive_int(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from wfm_ds import launch
    from wfm_ds.recipe import file as recipe_file

    load = recipe_file.load_tiny_recipe if args.tiny else recipe_file.load_recipe
    load(args.recipe, args.overrides)  # report recipe errors before starting any process
    command_line = launcher_arguments(args)
    if args.dry_run:
        sys.stdout.write(f"{shlex.join(['deepspeed', *command_line])}\n")
        return 0
    sys.stderr.write(f"wfm_ds {__version__}: starting {args.recipe}\n")
    return launch.run_launcher(command_line)


def launcher_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the `deepspeed` command. Raises UserError if --nodes or --hostfile is invalid."""
    if args.nodes is not None and args.hostfile is None:
        raise UserError("--nodes requires --hostfile")
    if args.hostfile is not None and not args.hostfile.is_file():
        raise UserError(f"--hostfile: file {args.hostfile} not found")
    arguments = [] if args.verbose else ["--quiet"]
    if args.hostfile is not None:
        arguments += ["--hostfile", str(args.hostfile)]
    if args.nodes is not None:
        arguments += ["--num_nodes", str(args.nodes)]
    number = "1" if args.gpus == ALL and args.hostfile is None and not has_gpus() else args.gpus
    if number != ALL:
        arguments += ["--num_gpus", number]
    arguments += ["--module", "wfm_ds.train", str(args.recipe), *args.overrides]
    return [*arguments, *(f"--{name}" for name in ("tiny", "overwrite") if getattr(args, name))]


def has_gpus() -> bool:
    """Return True if GPUs exist and DS_ACCELERATOR does not force the CPU."""
    from wfm_ds.distributed.accelerator import is_accelerator_present

    return is_accelerator_present() and os.environ.get("DS_ACCELERATOR") != "cpu"
