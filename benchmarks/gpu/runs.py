"""Runs that a benchmark steps by hand: a recipe's own loop with everything around it, in this process."""

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
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.memory_estimate import estimate_memory
from wfm_ds.run.model_loading import load_model
from wfm_ds.run.output_folder import RunStart, open_output_folder
from wfm_ds.training.diffusion_builder import build_diffusion_loop
from wfm_ds.training.loop import TrainingLoop
from wfm_ds.training.preflight import check_and_load_data

ROOT = Path(__file__).parents[2]
NUM_PICTURES = 16
# Nothing but steps: no evaluation, no file that a step would wait for.
QUIET = (
    *("run.steps=100000", "validation.every=0", "validation.at_start=false", "validation.prompts=null"),
    *("checkpoint.every=0", "checkpoint.export_every=0"),
    *("logging.console=false", "logging.tensorboard=false", "logging.sample_every=0"),
)
MOCK_RL = (
    *("data.kind=prompts", "data.name=prompts", "data.split=train"),
    f"data.path={ROOT / 'recipes' / 'tiny' / 'prompts' / 'colors'}",
    "reward.functions=[{name: mock}]",
)


class Phases:
    """The stopwatch of a job, which also notes each phase's FLOPs.

    What happens within a phase inside another one belongs to the outer one, as its seconds do.
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
class Opened:
    """A loop before its first step."""

    loop: TrainingLoop
    phases: Phases
    estimated_bytes: int  # of the memory that a rank needs, by `--check`
    metrics_file: Path

    def step(self) -> None:
        """The next step, and all that the loop waits for before it."""
        self.loop.wait_for_data(self.loop.step + 1)
        self.loop.run_step()

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far, one record a step: that of its first optimizer step."""
        records = [json.loads(line) for line in self.metrics_file.read_text().splitlines()]
        return [record for record in records if "time/step" in record]


@functools.cache
def world() -> World:
    """This process, alone. Without a launcher, so that a benchmark is one command."""
    choose_accelerator()
    return World.join()


@contextlib.contextmanager
def opened(recipe_path: Path, overrides: Sequence[str]) -> Iterator[Opened]:
    """Everything of a run that is ready for its first step; ended, and its memory given back, after the block."""
    with tempfile.TemporaryDirectory(prefix="wfm-gpu-") as temporary, contextlib.ExitStack() as held:
        recipe = loaded(recipe_path, overrides, Path(temporary))
        data, model = check_and_load_data(recipe, world().size), load_model(recipe, world().device)
        estimated = estimate_memory(recipe, model, world().size, device=world().device.type).peak_bytes
        recipe.run.output_dir.mkdir()
        open_output_folder(recipe, RunStart())  # rollout workers read the recipe there
        loop = build_diffusion_loop(recipe, world(), StopFlag(), model, data, RunStart(), None, held)
        loop.start()
        yield Opened(loop, Phases(loop), estimated, recipe.run.output_dir / "metrics.jsonl")
        del loop, model
    release()


def loaded(recipe_path: Path, overrides: Sequence[str], folder: Path) -> Recipe:
    """The recipe with data that need no download and rewards that cost nothing; `overrides` come last."""
    places = [f"run.output_dir={folder / 'run'}", *QUIET]
    plain = recipe_file.load_recipe(
        recipe_path, [*places, *(word for word in overrides if not word.startswith("data."))]
    )
    if plain.is_rl:
        return recipe_file.load_recipe(recipe_path, [*places, *MOCK_RL, *overrides])
    size = plain.sampling
    write_pictures(folder / "pictures", size.height, size.width)
    pictures = ["data.kind=paired", f"data.path={folder / 'pictures'}", "validation.holdout=0"]
    return recipe_file.load_recipe(recipe_path, [*places, *pictures, *overrides])


def write_pictures(folder: Path, height: int, width: int) -> None:
    """Noise with captions, of the size that is trained."""
    folder.mkdir()
    for number in range(NUM_PICTURES):
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
        (folder / f"{number}.json").write_text(json.dumps({"prompt": f"noise number {number}"}))


def release() -> None:
    """Give memory back to the device, so that the next run starts with all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
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


def timed(work: Callable[[], object]) -> float:
    """Seconds of the work and of all that it asked of the device."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def synchronize() -> None:
    if world().device.type == "cuda":
        torch.cuda.synchronize()
