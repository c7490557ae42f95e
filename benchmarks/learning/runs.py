"""Runs of the studies: ordinary runs, one process each, kept in a folder and not repeated if finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.learning.curves import check_counts
from benchmarks.learning.variants import Variant
from wfm_ds.cli.quickstart import prepare_folder, run_sft
from wfm_ds.demos.base import Demo
from wfm_ds.demos.digits import DigitsDemo
from wfm_ds.distributed.logs import quiet_libraries
from wfm_ds.errors import UserError

REVISION = "REVISION"
# One rank does the work of the two ranks of the recipes. The results are the same.
ONE_RANK = ("engine.micro_batch_size=100", "logging.tensorboard=false")


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One training run of the study."""

    name: str  # of the run's folder
    variant: Variant
    start: int  # seed of the SFT run that it starts from
    seed: int
    overrides: tuple[str, ...] = ()


def train_starts(out: Path, seeds: Sequence[int], world: Demo | None = None) -> None:
    """Prepare a demo (default: digits), and train its model with SFT for each seed, unless it is finished."""
    world = world or DigitsDemo()
    if not (out / "data").exists():
        quiet_libraries()
        prepare_folder(world, out)
    for seed in seeds:
        if not is_finished(out / f"sft_{seed}"):
            run_sft(world, out, out / f"sft_{seed}", seed)


def train_all(out: Path, runs: Sequence[StudyRun], jobs: int) -> None:
    """Train the unfinished runs, `jobs` in parallel. Raises UserError with the log file of a failed run."""
    missing = [run for run in runs if not is_finished(out / run.name)]
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(train_run, out, run) for run in missing]:
            done.result()


def train_run(out: Path, run: StudyRun) -> None:
    """Train one run, and compare its forward passes with the prediction from its recipe."""
    folder = out / run.name
    start = json.loads((out / f"sft_{run.start}" / "result.json").read_text())
    command = [
        *(sys.executable, "-m", "wfm_ds.train", str(run.variant.recipe)),
        f"run.output_dir={folder}",
        f"run.seed={run.seed}",
        f"model.path={start['artifacts']['pipeline']}",
        f"data.path={out / 'data' / run.variant.data}",
        f"validation.every={run.variant.every}",
        *ONE_RANK,
        *run.variant.overrides,
        *run.overrides,
    ]
    log = out / f"{run.name}.log"
    with log.open("w") as stream:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=single_thread_environment()
        ).returncode
    if code:
        raise UserError(f"{run.name} exited with code {code}: see {log}")
    check_counts(folder)
    (folder / REVISION).write_text(f"{report.describe_machine()['revision']}\n")


def single_thread_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def is_finished(folder: Path) -> bool:
    result = folder / "result.json"
    return result.exists() and json.loads(result.read_text())["status"] == "finished"


def list_revisions(out: Path, runs: Sequence[StudyRun]) -> str:
    """Return the revisions of the project that trained these runs."""
    return ", ".join(sorted({(out / run.name / REVISION).read_text().strip() for run in runs}))
