"""A run that receives SIGTERM in a step: it saves, exits with code 0, and a second run continues to the last step."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import runs

PATIENCE_S = 240.0
STEPS = 12


def start_run(recipe: Path, folder: Path, overrides: Sequence[str]) -> subprocess.Popen[str]:
    rl = () if "sft" in recipe.stem else runs.MOCK_RL
    words = [*runs.QUIET, *rl, f"run.output_dir={folder}", f"run.steps={STEPS}", *overrides]
    command = [sys.executable, "-m", "wfm_ds.train", str(recipe), *words]
    return subprocess.Popen(command, stdout=sys.stderr, text=True, cwd=runs.ROOT)


def read_steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line["step"] for line in lines if "optim/lr" in line]  # without lines of evaluations


def wait_for_first_step(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not read_steps(folder):
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            raise
        raise SystemExit(f"the run exited with status {process.returncode} before its first step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="overrides for the recipe")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="wfm-stopped-") as temporary:
        folder = Path(temporary) / "run"
        process = start_run(args.recipe, folder, args.set)
        try:
            wait_for_first_step(process, folder)
            signal_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=PATIENCE_S)
            seconds, reached = time.monotonic() - signal_s, read_steps(folder)
            again = start_run(args.recipe, folder, args.set)
            try:
                code_again = again.wait(timeout=PATIENCE_S)
            finally:
                again.kill()
        finally:
            process.kill()
        steps = read_steps(folder)
    wrong = code != 0 or code_again != 0 or len(reached) >= len(steps) or steps != list(range(1, len(steps) + 1))
    row = {
        "exit code": code,
        "s to stop": seconds,
        "stopped after": reached[-1],
        "exit code of the second run": code_again,
    }
    row |= {"last step": steps[-1]}
    return [row | ({"error": "the run did not stop or did not continue correctly"} if wrong else {})]
