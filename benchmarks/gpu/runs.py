"""Open a recipe's training loop in this process, so that a benchmark can run its steps one by one."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from wfm_ds.distributed.accelerator import choose_accelerator
from wfm_ds.distributed.lifecycle import StopFlag
from wfm_ds.distributed.world import World
from wfm_ds.engine.flop_counter import FlopCount
from wfm_ds.memory.estimate import estimate_memory
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.model_loading import load_model
from wfm_ds.runs.output_folder import RunStart, open_output_folder
from wfm_ds.training.diffusion_builder import build_diffusion_loop
from wfm_ds.training.loop import TrainingLoop
from wfm_ds.training.preflight import check_and_load_data

ROOT = Path(__file__).parents[2]
NUM_IMAGES = 16
# Only steps: no evaluation, and no files that a step would wait for.
QUIET = (
    *("run.steps=100000", "validation.every=0", "validation.at_start=false", "validation.prompts=null"),
    *("checkpoint.every=0", "checkpoint.export_every=0"),
    *("logging.console=false", "logging.tensorboard=false", "logging.sample_every=0"),
)
MOCK_RL = (
    *("data.kind=prompts", "data.name=prompts", "data.split=train"),
    f"data.path={ROOT / 'recipes' / 'prompts' / 'colors'}",
    "reward.functions=[{name: mock}]",
)


class Phases:
    """A job's stopwatch that also counts each phase's FLOPs.

    Work of a nested phase counts for the outer phase, like its seconds.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._job, self._timer = loop.job, loop.job.timer
        self._depth = 0
        self.work: dict[str, FlopCount] = {}
        loop.job.timer = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._depth += 1
        try:
            with self._timer(phase):
                yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.work[phase] = self.work.get(phase, FlopCount()) + (self._job.engine.pop_flop_count() or FlopCount())


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A loop before its first step."""

    loop: TrainingLoop
    phases: Phases
    estimated_bytes: int  # memory of a rank, as estimated by `--check`
    metrics_file: Path

    def run_step(self) -> None:
        """Run the next step, including its wait for data."""
        self.loop.wait_for_data(self.loop.step + 1)
        self.loop.run_step()

    def metric_lines(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps so far: for each step the record of its first optimizer step."""
        records = [json.loads(line) for line in self.metrics_file.read_text().splitlines()]
        return [record for record in records if "time/step" in record]


@functools.cache
def join_world() -> World:
    """Return a world of this process alone. No launcher is needed."""
    choose_accelerator()
    return World.join()


@contextlib.contextmanager
def open_run(recipe_path: Path, overrides: Sequence[str]) -> Iterator[OpenRun]:
    """Build a run that is ready for its first step. After the block it is closed and its memory is released."""
    with tempfile.TemporaryDirectory(prefix="wfm-gpu-") as temporary, contextlib.ExitStack() as held:
        recipe = load_quiet_recipe(recipe_path, overrides, Path(temporary))
        data, model = check_and_load_data(recipe, join_world().size), load_model(recipe, join_world().device)
        estimated = estimate_memory(recipe, model, join_world().size, device=join_world().device.type).peak_bytes
        recipe.run.output_dir.mkdir()
        open_output_folder(recipe, RunStart())  # rollout workers read the recipe there
        loop = build_diffusion_loop(recipe, join_world(), StopFlag(), model, data, RunStart(), None, held)
        loop.start()
        yield OpenRun(loop, Phases(loop), estimated, recipe.run.output_dir / "metrics.jsonl")
        del loop, model
    release_memory()


def load_quiet_recipe(recipe_path: Path, overrides: Sequence[str], folder: Path) -> Recipe:
    """Load the recipe with data that need no download and rewards without cost. `overrides` have precedence."""
    paths = [f"run.output_dir={folder / 'run'}", *QUIET]
    plain = recipe_file.load_recipe(
        recipe_path, [*paths, *(override for override in overrides if not override.startswith("data."))]
    )
    if plain.is_rl:
        return recipe_file.load_recipe(recipe_path, [*paths, *MOCK_RL, *overrides])
    size = plain.sampling
    write_noise_images(folder / "images", size.height, size.width)
    images = ["data.kind=paired", f"data.path={folder / 'images'}", "validation.holdout=0"]
    return recipe_file.load_recipe(recipe_path, [*paths, *images, *overrides])


def write_noise_images(folder: Path, height: int, width: int) -> None:
    """Write noise images with captions, in the size of the training."""
    folder.mkdir()
    for number in range(NUM_IMAGES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
        (folder / f"{number}.json").write_text(json.dumps({"prompt": f"noise number {number}"}))


def release_memory() -> None:
    """Release memory to the device, so that the next run can use all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def time_call(work: Callable[[], object]) -> float:
    """Return the seconds of a call, including its work on the device."""
    synchronize_device()
    began = time.perf_counter()
    work()
    synchronize_device()
    return time.perf_counter() - began


def synchronize_device() -> None:
    if join_world().device.type == "cuda":
        torch.cuda.synchronize()
