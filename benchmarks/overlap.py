"""Measure how long a step waits for generation and rewards, with and without rollout workers: `python -m
benchmarks.overlap`.

Trains a tiny SD3 with a reward that takes a fixed time for each sample, one sample after another: colocated, and with
one rollout worker at staleness 0 and 1. The same runs with a reward that takes no time measure the cost of generation
and training alone. Writes results/<date>-cpu-overlap.json. All runs are ordinary commands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import report
from wfm_reward.base import MediaBatch, Range, Reward, Score

REPOSITORY = Path(__file__).parent.parent
GROUPS, MEMBERS, CHUNK = 4, 4, 4
SAMPLES = GROUPS * MEMBERS
WARM_UP = 2  # steps until the pipeline is full
MODES = {
    "colocated": [],
    "workers, staleness 0": ["rollout.mode=async", "rollout.max_staleness=0"],
    "workers, staleness 1": ["rollout.mode=async", "rollout.max_staleness=1"],
}


class Slow(Reward):
    """Mean brightness, with a delay of `seconds` for each sample, like a large reward model."""

    name = "slow"
    media_types = frozenset({"image", "video"})
    outputs: ClassVar = {"slow": Range(0.0, 1.0)}
    primary_output = "slow"

    def __init__(self, device: str = "cpu", *, seconds: float = 0.0, **options: Any) -> None:
        super().__init__(device, **options)
        self.seconds = seconds

    def score(self, batch: MediaBatch) -> list[Score]:
        threading.Event().wait(self.seconds * len(batch))
        return [item.score(float(item.frames.mean()) / 255) for item in batch]


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="benchmarks.overlap", description=__doc__.split("\n")[0])
    p.add_argument("--seconds", type=float, default=0.2, help="time of the reward for each sample")
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--denoise-steps", type=int, default=4)
    options = p.parse_args(arguments)
    if options.steps <= WARM_UP:
        p.error(f"argument --steps: must be more than {WARM_UP}, because the first steps are not counted")
    about = report.describe_machine() | {"load": " ".join(Path("/proc/loadavg").read_text().split()[:3])}
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        path = report.write_results("overlap", about, measure_modes(Path(folder), options))
    sys.stdout.write(f"{report.format_table(json.loads(path.read_text())['rows'])}\n\n{path}\n")
    return 0


def measure_modes(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    reward_s = options.seconds * SAMPLES
    alone = run_training(folder / "alone", MODES["colocated"], 0.0, options)
    generation = run_training(folder / "generation", MODES["workers, staleness 1"], 0.0, options)
    rollout_s = statistics.fmean(line["time/step"] for line in generation)
    train_s = statistics.fmean(line["time/step"] - line["time/rollout"] for line in alone)
    rows = []
    for number, (name, overrides) in enumerate(MODES.items()):
        lines = run_training(folder / str(number), overrides, options.seconds, options)
        steps = [line["time/step"] for line in lines]
        rows.append(
            {
                "run": name,
                "mean step s": statistics.fmean(steps),
                "step s": {"median": statistics.median(steps), "min": min(steps), "max": max(steps)},
                "rewards alone s": reward_s,
                "worker and training alone s": rollout_s,
                "training alone s": train_s,
                # The mean, because a step after a long wait is short: its work was partly done while waiting.
                "mean step / larger of the two": statistics.fmean(steps) / max(reward_s, rollout_s),
                "their sum / larger": (reward_s + rollout_s) / max(reward_s, rollout_s),
            }
        )
    return rows


def run_training(
    out: Path, overrides: Sequence[str], seconds: float, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Train one run, and return the metrics of its steps after the warm-up."""
    reward = {"name": "benchmarks.overlap:Slow", "max_batch": 1, "options": {"seconds": seconds}}
    words = [
        "tests/recipes/sd3_nft.yaml",
        f"run.output_dir={out}",
        f"run.steps={options.steps}",
        f"rollout.prompts_per_step={GROUPS}",
        f"rollout.group_size={MEMBERS}",
        f"engine.max_forward_batch={CHUNK}",
        f"sampling.steps={options.denoise_steps}",
        f"reward.functions={json.dumps([reward])}",
        "validation.at_start=false",
        "validation.num_prompts=1",
        "logging.tensorboard=false",
        *overrides,
    ]
    with (out.parent / f"{out.name}.log").open("w+") as log:
        done = subprocess.run(
            [sys.executable, "-m", "wfm_ds.train", *words], cwd=REPOSITORY, stdout=log, stderr=log, check=False
        )
        log.seek(0)
        if done.returncode:
            raise SystemExit(f"a run exited with status {done.returncode}:\n{log.read()[-3000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "time/step" in line][WARM_UP:]


if __name__ == "__main__":
    sys.exit(main())
