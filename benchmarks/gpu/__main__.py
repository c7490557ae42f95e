"""Measurements on one GPU: `python -m benchmarks.gpu COMMAND`. The command `day` runs all of them in order."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from wfm_ds.program import run_with_exit_code

# A command is a module with `add_arguments` and `run`, which yields the rows of a table.
COMMANDS = {
    "day": ("day", "all calls in order, resumable and with time limits, and one table"),
    "machine": ("machine", "the device, the software, and the peak rates that percentages refer to"),
    "pipeline": ("pipelines", "a pipeline of released size with random weights"),
    "first_step": ("first_step", "the first step of recipes: finite numbers, and policy ratios of 1"),
    "roofline": ("roofline", "the highest MFU that the eager operators of recipes allow"),
    "quickstart": ("quickstart", "SFT and DiffusionNFT of the digits demo, with the reward before and after"),
    "steps": ("steps", "steps of recipes: phases, FLOP/s, memory, launches, waits for the device"),
    "against": ("against", "a recipe's steps compared with the published loop in plain torch"),
    "videos": ("videos", "forward and backward passes and decoding of videos, by attention kernel and dtype"),
    "matmuls": ("matmuls", "matrix products in bfloat16 and float8"),
    "stopped": ("stopped", "stop a run with SIGTERM during a step, and continue it"),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        importlib.import_module(f"benchmarks.gpu.{module}").add_arguments(command)
        command.add_argument("--json", type=Path, help="also write the rows to this file")
    return made


def run_measurement(args: argparse.Namespace) -> int:
    rows = []
    for row in importlib.import_module(f"benchmarks.gpu.{COMMANDS[args.command][0]}").run(args):
        rows.append(row)
        if args.json is not None:  # after each row, so that a killed command leaves its rows
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.stdout.write(report.format_table(rows) + "\n")
    return int(any("error" in row for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_with_exit_code(lambda: run_measurement(args))


if __name__ == "__main__":
    sys.exit(main())
