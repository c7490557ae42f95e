"""`wfm check`: run the checks of `python -m wfm_ds.train RECIPE --check`, for any number of GPUs."""

from __future__ import annotations

import argparse
import json
import sys

from wfm_ds.cli.train import parse_positive_int
from wfm_ds.program import CommandParser


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm check",
        description="Check a recipe, its data, model and rewards without training. Prints the derived numbers.",
        epilog="Example: %(prog)s sd3_nft --tiny --gpus 2",
    )
    p.add_recipe_arguments()
    p.add_argument(
        "--gpus", type=parse_positive_int, metavar="N", help="number of GPUs (default: all here, else the minimum)"
    )
    p.add_argument("--tiny", action="store_true", help="check the tiny version that wfm train --tiny runs")
    p.add_argument("--json", action="store_true", help="print one JSON object with sizes in bytes")
    p.add_argument(
        "--overwrite", action="store_true", help="ignore an existing run in the output folder, like wfm train"
    )
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.cli.doctor.command import count_visible_gpus
    from wfm_ds.distributed.accelerator import choose_accelerator, deterministic_kernels
    from wfm_ds.distributed.logs import quiet_libraries
    from wfm_ds.recipe import file as recipe_file

    quiet_libraries()
    choose_accelerator()
    visible = args.gpus or count_visible_gpus()
    if args.tiny:
        from wfm_ds.demos.tiny_data import load_tiny_recipe

        recipe = load_tiny_recipe(args.recipe, args.overrides, world_size=visible or 1)
    else:
        recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    from wfm_ds.training.run_check import check_run

    ranks = visible or recipe.engine.sequence_parallel
    with deterministic_kernels(recipe.engine.deterministic):
        report = check_run(recipe, ranks, overwrite=args.overwrite)
    if args.json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    sys.stdout.write(f"{report}\n")
    processes = f"{ranks} process{'' if ranks == 1 else 'es'}"
    tiny = " --tiny" if args.tiny else ""
    sys.stdout.write(
        f"ready: {processes}, {recipe.run.steps} steps; next: wfm train {args.recipe}{tiny} --gpus {ranks}\n"
    )
