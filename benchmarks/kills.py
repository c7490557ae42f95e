"""Kill all ranks of runs with SIGKILL, and check how the same command continues: `python -m benchmarks.kills`.

Two ranks train a tiny SD3 for four steps and save at every step. There are nine cases: SFT with a LoRA, DiffusionNFT
with a LoRA and with all weights, each at ZeRO 1, 2 and 3. In each case, one run is undisturbed. Other runs are killed
at random times (seeded): half at an operation on a file in checkpoints/ on either rank, half at any time after the
start. The same command then continues, and may be killed again, until it finishes. The study fails unless all of these
hold:

    * after each kill, metrics.jsonl contains the lines of the undisturbed run, and possibly half of the next line;
    * no complete checkpoint is lost, and the next start continues from the newest one;
    * at the end, metrics, exports and the last checkpoint (weights, ema, old, AdamW moments) are bit-identical.

On a failure the exit code is 1 and nothing is written. Speeds and times are not compared.

A tenth case kills runs that save at every second step during their first two steps, half of them at an operation on any
file of the run. Most are killed before the first checkpoint and start again from step 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.forked import AtFile, AtTime, Moment, RanksExit, start_ranks
from wfm_ds.checkpoint import store

REPOSITORY = Path(__file__).parent.parent
RANKS, STEPS = 2, 4
RECIPES = {"sft": "sd3_sft", "nft": "sd3_nft"}
KINDS = {"SFT, LoRA": ("sft", True), "DiffusionNFT, LoRA": ("nft", True), "DiffusionNFT, all weights": ("nft", False)}
STAGES = (1, 2, 3)
EARLY = ("SFT, LoRA", 2)  # kind and ZeRO stage of the case with kills in the first two steps
EARLY_STEPS = 2
COMMON = (
    *(f"run.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.export_every=2"),
    *("optimizer.lr=3e-2", "optimizer.warmup_steps=3", "ema={decay: 0.5}"),
    *("sampling.height=16", "sampling.width=16", "sampling.eval_steps=1"),
    *("validation.every=0", "validation.at_start=false", "validation.num_prompts=1", "logging.num_samples=1"),
    *("logging.console=false", "logging.tensorboard=false"),
)
OF_RECIPE = {
    "sft": ("engine.micro_batch_size=2", "engine.gradient_accumulation=1", "validation.num_images=1"),
    # Decays that depend on the step, so that a counter that restarts at 0 is detected.
    "nft": ("rollout.group_size=2", "sampling.steps=2", "algorithm.old_decay={initial: 0.3, slope: 0.1, max: 0.9}"),
}
# Prefixes of metrics that differ between runs.
CLOCKS = ("time", "perf/samples", "perf/tflops", "perf/mfu", "perf/peak")
# Columns of the result.
KILLS, IN_SAVE, BEFORE_FIRST = "kills", "inside a save", "before the first checkpoint"
LOST, EQUAL = "steps to do again, at most", "runs, all equal"
SUMMED = (KILLS, IN_SAVE, BEFORE_FIRST, EQUAL)
# Imported before forking, so that forks start fast.
WARM = (
    *("wfm_ds.train", "wfm_ds.training.preflight", "wfm_ds.runs.job", "wfm_ds.training.sft", "wfm_ds.training.rl"),
    "wfm_ds.rollout.colocated",
    *("wfm_ds.training.exporter", "wfm_ds.models.sd3", "wfm_ds.demos.digits_data"),
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    *("transformers.models.t5.modeling_t5", "transformers.models.clip.modeling_clip"),
)
ENVIRONMENT = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    ),  # a fork must not have threads
    **{"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
}


class StudyError(AssertionError):
    """A killed run differs from the undisturbed run."""


def recipe_overrides(folder: Path, kind: str, stage: int) -> list[str]:
    """Return the overrides of a case. folder: the files that all runs share."""
    name, lora = KINDS[kind]
    of_data = [f"data.path={folder / 'digits' / 'images'}"]
    if name == "nft":
        of_data = [f"data.path={REPOSITORY / 'recipes' / 'prompts' / 'colors'}", "reward.spawn=false"]
        of_data.append(f"reward.endpoint={folder / 'reward' / 'pipes.json'}")
    cut = [f"engine.deepspeed=zero{stage}", "lora={rank: 4, alpha: 8}" if lora else "lora=null"]
    return [f"model.path={folder / 'model'}", *of_data, *COMMON, *OF_RECIPE[name], *cut]


@dataclass(slots=True)
class KilledRun:
    """One output folder and the command that fills it."""

    folder: Path
    recipe: Path
    overrides: Sequence[str]
    steps: list[int] = field(default_factory=list)  # step of the newest complete checkpoint after each kill; 0 for none
    early: bool = False  # kills at operations on any file of the run, not only on checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, moment: Moment) -> RanksExit:
        """Run the command. Raises StudyError unless it finishes or is killed."""
        words = [str(self.recipe), f"run.output_dir={self.folder}", *self.overrides]
        scratch, watched = self.folder.parent, self.folder if self.early else self.checkpoints
        ended = start_ranks(words, RANKS, moment=moment, watched=watched, scratch=scratch)
        if not ended.killed and any(ended.exit_codes):
            raise StudyError(f"{self.folder}: exit codes {ended.exit_codes}\n{log_tails(scratch)}")
        self.require_right_start()
        return ended

    def require_right_start(self) -> None:
        """Check that each start continued from the newest checkpoint of that time. Raises StudyError."""
        log = self.folder / "logs" / "rank_0.log"
        continued = re.findall(r"continues after step (\d+) from", log.read_text()) if log.exists() else []
        allowed = [step for step in self.steps if step > 0]
        # A start that was killed early did not log the step from which it continued, so the log may lack some steps.
        remaining = iter(allowed)
        if not all(any(step == int(logged) for step in remaining) for logged in continued):
            raise StudyError(f"{self.folder}: continued after the steps {continued}, checkpoints were {allowed}")

    def examine(self, want: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Check the files after a kill. Raises StudyError unless a run can continue without losing anything."""
        lines = read_metrics(self.folder)
        if lines != list(want[: len(lines)]):
            raise StudyError(f"{self.folder}: its {len(lines)} lines of metrics differ from the undisturbed run")
        found = store.find_newest(self.checkpoints)
        step = 0 if found is None else found.step
        if self.steps and step < self.steps[-1]:
            raise StudyError(f"{self.folder}: the checkpoint of step {self.steps[-1]} is lost")
        self.steps.append(step)
        done = max((line["step"] for line in lines), default=0)
        saving = any(self.checkpoints.glob("*.tmp")) if self.checkpoints.exists() else False
        return {IN_SAVE: int(saving), BEFORE_FIRST: int(step == 0), LOST: max(0, done - step)}

    def require_equal(self, whole: KilledRun) -> None:
        """Raise StudyError unless this run is bit-identical to the undisturbed run."""
        if read_metrics(self.folder) != read_metrics(whole.folder):
            raise StudyError(f"{self.folder}: metrics differ from {whole.folder}")
        ours, theirs = read_tensors(self.folder), read_tensors(whole.folder)
        if ours.keys() != theirs.keys() or not ours:
            raise StudyError(f"{self.folder}: files differ from {whole.folder}: {sorted(ours.keys() ^ theirs.keys())}")
        if wrong := sorted(name for name, data in theirs.items() if ours[name] != data):
            raise StudyError(f"{self.folder}: tensors differ from {whole.folder} in {', '.join(wrong)}")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl, without times."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        {tag: value for tag, value in json.loads(line).items() if not tag.startswith(CLOCKS) and "seconds" not in tag}
        for line in lines
    ]


def read_tensors(folder: Path) -> dict[str, bytes]:
    """Return the tensor data of all exports and of the last checkpoint, by file."""
    files = [*folder.glob("safetensors/*/lora/*.safetensors"), *folder.glob("safetensors/*/transformer/*.safetensors")]
    files += folder.glob(f"checkpoints/step_{STEPS}/*.safetensors")
    found = {}
    for file in files:
        data = file.read_bytes()
        found[str(file.relative_to(folder))] = data[8 + int.from_bytes(data[:8], "little") :]  # without the header
    return found


def log_tails(scratch: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in scratch.glob("rank_*.log"))


def study_case(folder: Path, kind: str, stage: int, kills: int, draw: random.Random) -> dict[str, Any]:
    """Return the result row of a case. Raises StudyError."""
    name, _ = KINDS[kind]
    base = folder / f"{name}_{len(kind)}_zero{stage}"
    base.mkdir()
    whole = KilledRun(base / "whole", recipe_path(name), recipe_overrides(folder, kind, stage))
    return {"case": kind, "ZeRO": stage} | study_kills(whole, whole.start(None), kills, draw)


def study_early(folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """Return the result row for kills in the first two steps. Raises StudyError."""
    kind, stage = EARLY
    base = folder / "early"
    base.mkdir()
    recipe = recipe_path(KINDS[kind][0])
    overrides = [*recipe_overrides(folder, kind, stage), f"checkpoint.every={EARLY_STEPS}"]
    whole = KilledRun(base / "whole", recipe, overrides, early=True)
    whole.start(None)
    # This run measures the time of the first two steps and the number of their file operations.
    first = KilledRun(base / "first", recipe, [*overrides, f"run.steps={EARLY_STEPS}"], early=True).start(None)
    return {"case": f"{kind}, first two steps", "ZeRO": stage} | study_kills(whole, first, kills, draw)


def recipe_path(name: str) -> Path:
    return REPOSITORY / "tests" / "recipes" / f"{RECIPES[name]}.yaml"


def study_kills(whole: KilledRun, extent: RanksExit, kills: int, draw: random.Random) -> dict[str, int]:
    """Kill runs like `whole` at random moments within `extent`, and continue each until it finishes.

    Raises StudyError.
    """
    want, left, runs = read_metrics(whole.folder), list[dict[str, int]](), 0
    while len(left) < kills:
        run = KilledRun(whole.folder.with_name(f"killed_{runs}"), whole.recipe, whole.overrides, early=whole.early)
        runs += 1
        while run.start(moment := draw_moment(draw, len(left), kills, extent)).killed:
            left.append(run.examine(want))
            sys.stderr.write(f"{whole.folder.parent.name}: killed at {moment}, continues from step {run.steps[-1]}\n")
        run.require_equal(whole)
    sums = {what: sum(of_kill[what] for of_kill in left) for what in (IN_SAVE, BEFORE_FIRST)}
    lost = max(of_kill[LOST] for of_kill in left)
    return {KILLS: len(left), **sums, LOST: lost, EQUAL: runs}


def draw_moment(draw: random.Random, number: int, kills: int, undisturbed: RanksExit) -> Moment:
    """Draw the next moment; None after enough kills."""
    if number >= kills:
        return None
    if number % 2:
        return AtTime(draw.uniform(0, undisturbed.seconds))
    rank = draw.randrange(RANKS)
    return AtFile(rank, draw.randint(1, undisturbed.file_operations[rank]))


def run_all_cases(folder: Path, kills: int, early: int, seed: int, result: Path) -> None:
    """Run every case in the process that forks, and write the rows as JSON to `result`."""
    for name in WARM:
        importlib.import_module(name)
    draw, rows = random.Random(seed), []
    if kills:
        for kind in KINDS:
            for stage in STAGES:
                rows.append(study_case(folder, kind, stage, kills, draw))
    if early:
        rows.append(study_early(folder, early, draw))
    result.write_text(json.dumps(rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kills", description="Kill runs, continue them, and compare the results."
    )
    parser.add_argument("--kills", type=int, default=4, help="kills in each of the nine cases (default 4)")
    parser.add_argument("--early", type=int, default=30, help="kills in the first two steps (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--forking", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.forking:
        run_all_cases(options.forking, options.kills, options.early, options.seed, options.forking / "rows.json")
        return 0
    with tempfile.TemporaryDirectory(prefix="wfm-kills-") as name:
        rows = study_all_cases(Path(name), options.kills, options.early, options.seed)
    if rows is None:
        return 1
    rows.append(
        {"case": "all", **{key: sum(row[key] for row in rows) for key in SUMMED}, LOST: max(r[LOST] for r in rows)}
    )
    report.print_results("kills", rows, write=not options.no_write)
    return 0


def study_all_cases(folder: Path, kills: int, early: int, seed: int) -> list[dict[str, Any]] | None:
    """Return the rows of all cases; None if one failed, which was reported. All runs share one reward service."""
    from wfm_ds.demos.digits_data import write_digits
    from wfm_ds.models.tiny import write_tiny_model
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.rollout.reward_service import RewardService

    write_digits(folder / "digits")
    write_tiny_model("sd3", folder / "model")
    with RewardService(recipe_file.load_recipe(recipe_path("nft")).rl.reward, folder / "reward"):
        command = [sys.executable, "-m", "benchmarks.kills", "--forking", str(folder)]
        command += ["--kills", str(kills), "--early", str(early), "--seed", str(seed)]
        failed = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode
    return None if failed else json.loads((folder / "rows.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
