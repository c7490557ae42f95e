"""`wfm check`: run the checks of `python -m wfm_ds.train RECIPE --check` for any number of GPUs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys

from wfm_ds.cli.sampling_options import parse_positive
from wfm_ds.program import CommandParser, collect_garbage_rarely


def parser() -> CommandParser:
    p = CommandParser(
        description="Check a recipe, its data, model and rewards without training. Prints the derived numbers.",
        epilog="Example: %(prog)s sd3_nft --tiny --gpus 2",
    )
    p.add_recipe_arguments()
    p.add_argument(
        "--gpus", type=parse_positive, metavar="N", help="number of GPUs (default: all here; without GPUs, the minimum)"
    )
    p.add_argument("--tiny", action="store_true", help="check the tiny version that wfm train --tiny runs")
    p.add_argument("--json", action="store_true", help="print one JSON object with sizes in bytes")
    p.add_argument(
        "--overwrite", action="store_true", help="ignore an existing run in the output folder, like wfm train"
    )
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.cli.doctor.command import count_visible_gpus
    from wfm_ds.distributed.accelerator import choose_accelerator, deterministic_kernels, is_accelerator_present
    from wfm_ds.recipe import file as recipe_file

    visible = args.gpus or (count_visible_gpus() if is_accelerator_present() else 0)
    if args.tiny:
        from wfm_ds.demos.tiny_data import load_tiny_recipe

        recipe = load_tiny_recipe(args.recipe, args.overrides, world_size=visible or 1)
    else:
        recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    from wfm_ds.training.early_checks import check_early

    ranks = visible or recipe.engine.sequence_parallel
    check_early(recipe, ranks, overwrite=args.overwrite)
    with collect_garbage_rarely():
        choose_accelerator()
        from wfm_ds.training.preflight import check_run

        with deterministic_kernels(recipe.engine.deterministic):
            report = check_run(recipe, ranks, overwrite=args.overwrite)
    if args.json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    sys.stdout.write(f"{report}\n")
    processes = f"{ranks} process{'' if ranks == 1 else 'es'}"
    command = ["wfm", "train", str(args.recipe), *args.overrides, *(["--tiny"] if args.tiny else [])]
    command += ["--gpus", str(ranks), *(["--overwrite"] if args.overwrite else [])]
    sys.stdout.write(f"ready: {processes}, {recipe.run.steps} steps; next: {shlex.join(command)}\n")
