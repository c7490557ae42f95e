"""`wfm train`: run the `deepspeed` command for a recipe, with reduced launcher output."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from wfm_ds import __version__
from wfm_ds.cli.sampling_options import parse_positive
from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

ALL = "all"


def parser() -> CommandParser:
    p = CommandParser(
        description="Train a recipe with one process per GPU.",
        epilog="Example: %(prog)s sd3_nft --tiny run.steps=4 --gpus 2",
    )
    p.add_recipe_arguments()
    p.add_argument(
        "--gpus", type=parse_gpus, default=ALL, metavar="N|all", help="GPUs per machine (default: all; CPU: 1 process)"
    )
    p.add_argument("--hostfile", type=Path, metavar="F", help="run on the machines in this file (docs/multi-node.md)")
    p.add_argument("--nodes", type=parse_positive, metavar="N", help="use only the first N machines of the hostfile")
    p.add_argument(
        "--tiny", action="store_true", help="two steps on a CPU, with a tiny random model and built-in data and rewards"
    )
    p.add_argument("--overwrite", action="store_true", help="replace an existing run in the output folder")
    p.add_argument("--dry-run", action="store_true", help="print the deepspeed command and exit")
    p.add_argument("-v", "--verbose", action="store_true", help="show the output of the DeepSpeed launcher")
    return p


def parse_gpus(text: str) -> str:
    if text != ALL:
        parse_positive(text)
    return text


def run(args: argparse.Namespace) -> int:
    from wfm_ds import launch
    from wfm_ds.recipe import file as recipe_file

    # Report errors before starting any process.
    num_ranks = count_ranks(args)
    if args.tiny:
        recipe = recipe_file.load_tiny_recipe(args.recipe, args.overrides, world_size=num_ranks or 1)
    else:
        recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    command_line = launcher_arguments(args)
    if args.dry_run:
        sys.stdout.write(f"{shlex.join(['deepspeed', *command_line])}\n")
        return 0
    has_hostfile = args.hostfile is not None or launch.DEFAULT_HOSTFILE.is_file()
    if not has_hostfile:  # the machines of a hostfile may have other files
        if args.tiny:
            from wfm_ds.demos.tiny_data import write_tiny_data

            write_tiny_data(recipe)
        from wfm_ds.training.early_checks import check_early

        check_early(recipe, num_ranks, overwrite=args.overwrite)
    sys.stderr.write(f"wfm_ds {__version__}: starting {args.recipe}\n")
    if args.gpus not in (ALL, "1") and not args.tiny and args.hostfile is None and not has_gpus():
        sys.stderr.write(
            f"no GPU is used on this machine: --gpus {args.gpus} starts {args.gpus} processes on the CPU\n"
        )
    if num_ranks == 1 and not (has_hostfile or args.verbose or has_gpus()):
        return launch.run_single_rank(rank_arguments(args))
    return launch.run_launcher(command_line)


def launcher_arguments(args: argparse.Namespace) -> list[str]:
    if args.nodes is not None and args.hostfile is None:
        raise UserError("--nodes requires --hostfile")
    if args.hostfile is not None and not args.hostfile.is_file():
        raise UserError(f"--hostfile: file {args.hostfile} not found")
    arguments = [] if args.verbose else ["--log_level", "critical"]  # its errors only repeat the failed command
    if args.hostfile is not None:
        arguments += ["--hostfile", str(args.hostfile)]
    if args.nodes is not None:
        arguments += ["--num_nodes", str(args.nodes)]
    if (num_ranks := count_ranks(args)) is not None:
        arguments += ["--num_gpus", str(num_ranks)]
    return [*arguments, "--module", "wfm_ds.train", *rank_arguments(args)]


def rank_arguments(args: argparse.Namespace) -> list[str]:
    options = [f"--{name}" for name in ("tiny", "overwrite") if getattr(args, name)]
    return [str(args.recipe), *args.overrides, *options]


def count_ranks(args: argparse.Namespace) -> int | None:
    """Return the number of ranks per machine, or None to start one rank per GPU."""
    if args.gpus != ALL:
        return int(args.gpus)
    return None if args.hostfile is not None or has_gpus() else 1


def has_gpus() -> bool:
    from wfm_ds.distributed.accelerator import is_accelerator_present

    return is_accelerator_present() and os.environ.get("DS_ACCELERATOR") != "cpu"
