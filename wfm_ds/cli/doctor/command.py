"""`wfm doctor [RECIPE [section.key=value ...]]`: check this machine and whether it can train a recipe."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from wfm_ds.cli.doctor.finding import DoctorFinding
from wfm_ds.cli.sampling_options import parse_positive
from wfm_ds.errors import UserError
from wfm_ds.program import USER_ERROR_CODE, CommandParser

MASTER_PORT = 29500  # the DeepSpeed launcher's default for runs on several machines
COLORS = {"ok": "green", "warning": "yellow", "error": "red"}


def parser() -> CommandParser:
    p = CommandParser(description="Check the machine and the requirements of a recipe before a run.")
    p.add_argument("recipe", nargs="?", type=Path, help="YAML recipe (default: check the machine only)")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="recipe overrides")
    p.add_argument(
        "--ranks",
        type=parse_positive,
        help="number of ranks (default: the GPUs of this machine, or the minimum of the recipe)",
    )
    p.add_argument("--hostfile", type=Path, help="also check the hosts in this hostfile over ssh")
    p.add_argument(
        "--master_port", type=int, default=MASTER_PORT, help="port for the ranks' rendezvous (default %(default)s)"
    )
    p.add_argument(
        "--fix", action="store_true", help="only repair the deepspeed command of this environment, without other checks"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    return p


def run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed.accelerator import choose_accelerator

    if args.fix:
        from wfm_ds.cli.doctor.deepspeed_script import run_fix

        return run_fix()
    choose_accelerator()
    results = list(collect_findings(args))
    sys.stdout.write(format_json(results)) if args.json else print_table(results)
    return USER_ERROR_CODE if any(finding.level == "error" for finding in results) else 0


def collect_findings(args: argparse.Namespace) -> Iterator[DoctorFinding]:
    from wfm_ds.cli.doctor.deepspeed_script import script_finding, scripts_folder
    from wfm_ds.cli.doctor.machine import host_findings, machine_findings, port_finding

    yield from machine_findings()
    yield script_finding(scripts_folder())
    yield port_finding(args.master_port, is_needed=args.hostfile is not None)
    if args.hostfile is not None:
        try:
            yield from host_findings(args.hostfile)
        except UserError as error:
            yield DoctorFinding("hostfile", "error", str(error))
    if args.recipe is not None:
        yield from collect_recipe_findings(args)


def collect_recipe_findings(args: argparse.Namespace) -> Iterator[DoctorFinding]:
    from wfm_ds.cli.doctor.recipe import recipe_findings
    from wfm_ds.recipe import file as recipe_file

    try:
        recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    except UserError as error:
        yield DoctorFinding("recipe", "error", str(error))
        return
    yield DoctorFinding("recipe", "ok", f"{args.recipe}: {recipe.algorithm.name}")
    yield from recipe_findings(recipe, args.ranks or count_visible_gpus() or recipe.engine.sequence_parallel)


def count_visible_gpus() -> int:
    import torch

    from wfm_ds.distributed.accelerator import uses_cuda

    return torch.cuda.device_count() if uses_cuda() else 0


def format_json(findings: Sequence[DoctorFinding]) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    return json.dumps({"errors": errors, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2) + "\n"


def print_table(findings: Sequence[DoctorFinding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "check", "result", "what to do", show_lines=False)
    for finding in findings:
        level = f"[{COLORS[finding.level]}]{finding.level}[/]"
        table.add_row(level, escape(finding.name), escape(finding.text), escape(finding.advice))
    Console(file=sys.stdout).print(table)
