"""`wfm fetch RECIPE`: download the model, prompt set and reward weights of a recipe before it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from wfm_ds.errors import UserError
from wfm_ds.program import CommandParser

if TYPE_CHECKING:
    from wfm_ds.runs.fetch_plan import FetchPlan

MB, GB = 10**6, 10**9


def parser() -> CommandParser:
    p = CommandParser(
        description="List the model, prompt set and reward weights that a recipe needs and this machine does not have, "
        "with sizes and licences, then download them.",
        epilog="Example: %(prog)s sd3_nft --dry-run",
    )
    p.add_recipe_arguments()
    p.add_argument("-y", "--yes", action="store_true", help="download without a question")
    p.add_argument(
        "--dry-run", action="store_true", help="only list; downloads at most configuration files and metadata"
    )
    return p


def run(args: argparse.Namespace) -> None:
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.runs.fetch_plan import plan_downloads, require_free_space

    plan = plan_downloads(recipe_file.load_recipe(args.recipe, args.overrides))
    sys.stdout.write(describe_plan(plan))
    free = require_free_space(plan.items)
    if plan.items:
        sys.stdout.write("".join(f"free in {path}: {size_text(space)}\n" for path, space in free.items()))
        if args.dry_run:
            return
        if not args.yes:
            confirm_download(plan)
        for item in plan.items:
            item.download()
            sys.stdout.write(f"done: {item.source}\n")
    command = shlex.join(["wfm", "check", str(args.recipe), *args.overrides])
    sys.stdout.write(f"next: {command}\n" if plan.items else f"nothing to download; next: {command}\n")


def describe_plan(plan: FetchPlan) -> str:
    lines = [
        f"{item.purpose}: {item.source}, {size_text(item.num_bytes)}, licence {item.licence}, to {item.target}"
        for item in plan.items
    ]
    if len(lines) > 1:
        lines.append(f"total {size_text(plan.num_bytes)}")
    return "".join(f"{line}\n" for line in [*lines, *plan.notes])


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB" if num_bytes >= GB else f"{num_bytes / MB:.1f} MB"


def confirm_download(plan: FetchPlan) -> None:
    if not sys.stdin.isatty():
        raise UserError("wfm fetch asks before it downloads, but stdin is not a terminal: add --yes or --dry-run")
    sys.stdout.write(f"Download {size_text(plan.num_bytes)}? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was downloaded: answer y, or add --yes")
