"""`python -m benchmarks.kills`: kill all ranks with SIGKILL, and see what the same command makes of what is left.

Two ranks train a tiny SD3 for four steps and save at every step. Nine cases: supervised LoRA, DiffusionNFT of a LoRA
and of all weights, each at ZeRO 1, 2 and 3. Of each, one run is left alone; others are killed at instants that a seed
draws, half of them at an operation on a file below checkpoints/ on either rank, half at any time from the start on. The
same command then goes on, and may be killed again, until it finishes. A run that was killed fails the study unless

    * after each kill, metrics.jsonl holds the lines of the run that was left alone, and perhaps half of the next;
    * no checkpoint that was complete is lost, and the next start continues from the newest one;
    * in the end metrics, exports and the last checkpoint (weights, ema, old, AdamW's moments) are equal to the bit.

Exit code 1, and nothing written, if one does. Speeds and times are no part of it.

A tenth case kills runs that save at every second step at instants of their first two steps, half of them at an
operation on any file of the run: most are killed before there is a checkpoint, and begin again from step 0.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.forked import AtFile, AtTime, Ended, Moment, start
from wfm_ds.checkpoint import store

REPOSITORY = Path(__file__).parent.parent
RANKS, STEPS = 2, 4
RECIPES = {"sft": "sd3_sft", "nft": "sd3_nft"}
KINDS = {"SFT, LoRA": ("sft", True), "DiffusionNFT, LoRA": ("nft", True), "DiffusionNFT, all weights": ("nft", False)}
STAGES = (1, 2, 3)
EARLY = ("SFT, LoRA", 2)  # kind and ZeRO stage of the case that is killed in its first two steps
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
    # Decays that depend on the step, so that a counter that began anew would show.
    "nft": ("rollout.group_size=2", "sampling.steps=2", "algorithm.old_decay={initial: 0.3, slope: 0.1, max: 0.9}"),
}
# First words of metrics that no two runs have in common.
CLOCKS = ("time", "perf/samples", "perf/tflops", "perf/mfu", "perf/peak")
# Columns of the result.
KILLS, IN_SAVE, BEFORE_FIRST = "kills", "inside a save", "before the first checkpoint"
LOST, EQUAL = "steps to do again, at most", "runs, all equal"
SUMMED = (KILLS, IN_SAVE, BEFORE_FIRST, EQUAL)
# What a run imports, so that forks need not.
WARM = (
    *("wfm_ds.train", "wfm_ds.training.preflight", "wfm_ds.run.job", "wfm_ds.training.sft", "wfm_ds.training.rl"),
    "wfm_ds.rollout.colocated",
    *("wfm_ds.training.exporter", "wfm_ds.models.sd3", "wfm_ds.data.digits"),
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    *("transformers.models.t5.modeling_t5", "transformers.models.clip.modeling_clip"),
)
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),  # a fork must have no threads
    **{"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
}


class StudyError(AssertionError):
    """A run that was killed is not the run that was left alone."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files that all runs have in common, made once below a folder."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def images(self) -> Path:
        return self.folder / "digits" / "images"

    @property
    def rewards(self) -> Path:
        return self.folder / "reward"

    def overrides(self, kind: str, stage: int) -> list[str]:
        """Return the overrides of a case's recipe."""
        name, lora = KINDS[kind]
        of_data = [f"data.path={self.images}"]
        if name == "nft":
            of_data = [f"data.path={REPOSITORY / 'recipes' / 'tiny' / 'prompts' / 'colors'}", "reward.spawn=false"]
            of_data.append(f"reward.endpoint={self.rewards / 'pipes.json'}")
        cut = [f"engine.deepspeed=zero{stage}", "lora={rank: 4, alpha: 8}" if lora else "lora=null"]
        return [f"model.path={self.model}", *of_data, *COMMON, *OF_RECIPE[name], *cut]


@dataclass(slots=True)
class Run:
    """One output folder, and the command that fills it."""

    folder: Path
    recipe: str
    overrides: Sequence[str]
    steps: list[int] = field(default_factory=list)  # of the newest complete checkpoint after each kill; 0 for none
    early: bool = False  # killed at operations on any of its files, not on checkpoints alone

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, moment: Moment) -> Ended:
        """Raises StudyError unless it finishes, or is killed."""
        words = [self.recipe, f"run.output_dir={self.folder}", *self.overrides]
        scratch, watched = self.folder.parent, self.folder if self.early else self.checkpoints
        ended = start(words, RANKS, moment=moment, watched=watched, scratch=scratch)
        if not ended.killed and any(ended.exit_codes):
            raise StudyError(f"{self.folder}: exit codes {ended.exit_codes}\n{tails(scratch)}")
        self.require_right_start()
        return ended

    def require_right_start(self) -> None:
        """Raises StudyError unless each start that got so far continued from what was then the newest checkpoint."""
        log = self.folder / "logs" / "rank_0.log"
        continued = re.findall(r"continues after step (\d+) from", log.read_text()) if log.exists() else []
        allowed = [step for step in self.steps if step > 0]
        # A start that was killed early has not said where it continued from: those are left out, in their order.
        remaining = iter(allowed)
        if not all(any(step == int(said) for step in remaining) for said in continued):
            raise StudyError(f"{self.folder}: continued after the steps {continued}, checkpoints were {allowed}")

    def examine(self, want: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Examine what a kill left. Raises StudyError unless a run can continue from it and has lost nothing."""
        lines = records(self.folder)
        if lines != list(want[: len(lines)]):
            raise StudyError(f"{self.folder}: its {len(lines)} lines of metrics are not those of the run left alone")
        found = store.find_newest(self.checkpoints)
        step = 0 if found is None else found.step
        if self.steps and step < self.steps[-1]:
            raise StudyError(f"{self.folder}: the checkpoint of step {self.steps[-1]} is lost")
        self.steps.append(step)
        done = max((line["step"] for line in lines), default=0)
        saving = any(self.checkpoints.glob("*.tmp")) if self.checkpoints.exists() else False
        return {IN_SAVE: int(saving), BEFORE_FIRST: int(step == 0), LOST: max(0, done - step)}

    def require_equal(self, whole: Run) -> None:
        """Raises StudyError unless it is the run that was left alone, to the bit."""
        if records(self.folder) != records(whole.folder):
            raise StudyError(f"{self.folder}: other metrics than {whole.folder} has")
        ours, theirs = tensors(self.folder), tensors(whole.folder)
        if ours.keys() != theirs.keys() or not ours:
            raise StudyError(
                f"{self.folder}: other files than {whole.folder} has: {sorted(ours.keys() ^ theirs.keys())}"
            )
        if wrong := sorted(name for name, data in theirs.items() if ours[name] != data):
            raise StudyError(f"{self.folder}: other tensors than {whole.folder} has in {', '.join(wrong)}")


def records(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without what clocks say."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        {tag: value for tag, value in json.loads(line).items() if not tag.startswith(CLOCKS) and "seconds" not in tag}
        for line in lines
    ]


def tensors(folder: Path) -> dict[str, bytes]:
    """The tensors of all exports and of the last checkpoint, as they lie in their files."""
    files = [*folder.glob("safetensors/*/lora/*.safetensors"), *folder.glob("safetensors/*/transformer/*.safetensors")]
    files += folder.glob(f"checkpoints/step_{STEPS}/*.safetensors")
    found = {}
    for file in files:
        data = file.read_bytes()
        found[str(file.relative_to(folder))] = data[8 + int.from_bytes(data[:8], "little") :]  # after the header
    return found


def tails(scratch: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in scratch.glob("rank_*.log"))


def study(
    inputs: Inputs, kind: str, stage: int, *, kills: int, draw: random.Random, say: Callable[[str], None]
) -> dict[str, Any]:
    """A row of figures about a case. Raises StudyError."""
    name, _ = KINDS[kind]
    base = inputs.folder / f"{name}_{len(kind)}_zero{stage}"
    base.mkdir()
    recipe = str(REPOSITORY / "recipes" / "tiny" / f"{RECIPES[name]}.yaml")
    whole = Run(base / "whole", recipe, inputs.overrides(kind, stage))
    undisturbed = whole.start(None)
    return killed(whole, undisturbed, kills=kills, draw=draw, say=say) | {"case": kind, "ZeRO": stage}


def study_early(inputs: Inputs, *, kills: int, draw: random.Random, say: Callable[[str], None]) -> dict[str, Any]:
    """A row of figures about kills in the first two steps. Raises StudyError."""
    kind, stage = EARLY
    base = inputs.folder / "early"
    base.mkdir()
    recipe = str(REPOSITORY / "recipes" / "tiny" / f"{RECIPES[KINDS[kind][0]]}.yaml")
    overrides = [*inputs.overrides(kind, stage), f"checkpoint.every={EARLY_STEPS}"]
    whole = Run(base / "whole", recipe, overrides, early=True)
    whole.start(None)
    # A run that ends there tells how long the first two steps take, and how many files they touch.
    first = Run(base / "first", recipe, [*overrides, f"run.steps={EARLY_STEPS}"], early=True).start(None)
    return killed(whole, first, kills=kills, draw=draw, say=say) | {"case": f"{kind}, first two steps", "ZeRO": stage}


def killed(whole: Run, extent: Ended, *, kills: int, draw: random.Random, say: Callable[[str], None]) -> dict[str, Any]:
    """Kill runs like `whole` at instants of `extent`, each until it finishes. Raises StudyError."""
    want, left, runs = records(whole.folder), list[dict[str, int]](), 0
    while len(left) < kills:
        run = Run(whole.folder.with_name(f"killed_{runs}"), whole.recipe, whole.overrides, early=whole.early)
        runs += 1
        while run.start(moment := drawn(draw, len(left), kills, extent)).killed:
            left.append(run.examine(want))
            say(f"{whole.folder.parent.name}: killed at {moment}, goes on from step {run.steps[-1]}")
        run.require_equal(whole)
    sums = {what: sum(of_kill[what] for of_kill in left) for what in (IN_SAVE, BEFORE_FIRST)}
    lost = max(of_kill[LOST] for of_kill in left)
    return {"case": "", "ZeRO": 0, KILLS: len(left), **sums, LOST: lost, EQUAL: runs}


def drawn(draw: random.Random, number: int, kills: int, undisturbed: Ended) -> Moment:
    """The next instant; None once there were enough."""
    if number >= kills:
        return None
    if number % 2:
        return AtTime(draw.uniform(0, undisturbed.seconds))
    rank = draw.randrange(RANKS)
    return AtFile(rank, draw.randint(1, undisturbed.file_operations[rank]))


def all_cases(folder: Path, kills: int, early: int, seed: int, result: Path) -> None:
    """Run every case in the process that forks, and write their rows as JSON to `result`."""
    for name in WARM:
        importlib.import_module(name)
    draw, rows = random.Random(seed), []
    if kills:
        for kind in KINDS:
            for stage in STAGES:
                rows.append(study(Inputs(folder), kind, stage, kills=kills, draw=draw, say=say))
    if early:
        rows.append(study_early(Inputs(folder), kills=early, draw=draw, say=say))
    result.write_text(json.dumps(rows))


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def make_inputs(inputs: Inputs) -> None:
    from wfm_ds.data.digits import write_digits
    from wfm_ds.models.tiny import write_tiny_model

    write_digits(inputs.folder / "digits")
    write_tiny_model("sd3", inputs.model)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kills", description="Kill runs, and compare what becomes of them."
    )
    parser.add_argument("--kills", type=int, default=4, help="of each of the nine cases (default 4)")
    parser.add_argument("--early", type=int, default=30, help="in the first two steps (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--forking", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.forking:
        all_cases(options.forking, options.kills, options.early, options.seed, options.forking / "rows.json")
        return 0
    with tempfile.TemporaryDirectory(prefix="wfm-kills-") as name:
        folder = Path(name)
        rows = studied(Inputs(folder), options.kills, options.early, options.seed)
    if rows is None:
        return 1
    rows.append(
        {"case": "all", **{key: sum(row[key] for row in rows) for key in SUMMED}, LOST: max(r[LOST] for r in rows)}
    )
    sys.stdout.write(report.table(rows) + "\n")
    if not options.no_write:
        report.write("kills", report.machine(), rows)
    return 0


def studied(inputs: Inputs, kills: int, early: int, seed: int) -> list[dict[str, Any]] | None:
    """The rows of all cases; None if one failed, which has been said. One reward service is for all runs: they come
    and go, it stays."""
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.rollout.rewards import RewardService

    make_inputs(inputs)
    reward = recipe_file.load_recipe(REPOSITORY / "recipes" / "tiny" / f"{RECIPES['nft']}.yaml").reward
    assert reward is not None
    with RewardService(reward, inputs.rewards):
        command = [sys.executable, "-m", "benchmarks.kills", "--forking", str(inputs.folder)]
        command += ["--kills", str(kills), "--early", str(early), "--seed", str(seed)]
        failed = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode
    return None if failed else json.loads((inputs.folder / "rows.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
