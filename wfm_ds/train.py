"""`deepspeed --num_gpus N -m wfm_ds.train RECIPE [section.key=value ...]`: train a recipe.

Exit codes: 0 finished, or stopped by a signal at a step boundary; 2 recipe, data, model or reward error (one message);
1 any other error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from wfm_ds import __version__
from wfm_ds.program import Parser, program

if TYPE_CHECKING:
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.run.ending import Ending
    from wfm_ds.run.folder import Start
    from wfm_ds.run.mirror import Mirror
    from wfm_ds.run.result import Outcome
    from wfm_ds.run.stored import Copies
    from wfm_ds.training.loop import Loop

    LoopBuilder: TypeAlias = Callable[[Start, Mirror | None, ExitStack], Loop]
    """Builds the training loop of a prepared run. The ExitStack closes its resources. Collective."""
    AdviceContext: TypeAlias = Callable[[Callable[[], str | None]], AbstractContextManager[None]]
    """Context for a phase of the run: its out-of-memory errors list the recipe keys to change."""

log = logging.getLogger("wfm_ds.train")  # __name__ is __main__ with -m

NAMED_FIRST_S = 60.0  # collectives time out this much later than the heartbeat, which reports the cause


def parser() -> Parser:
    p = Parser(
        prog="python -m wfm_ds.train",
        description="Post-train a diffusers pipeline with a recipe.",
        epilog="Example: deepspeed --num_gpus 8 -m wfm_ds.train recipes/sd3_nft.yaml run.steps=200",
    )
    p.add_argument("recipe", type=Path, help="a YAML recipe (docs/recipes.md)")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the recipe")
    p.add_argument(
        "--check", action="store_true", help="validate recipe, data, model and rewards, print derived numbers, and exit"
    )
    p.add_argument("--overwrite", action="store_true", help="replace an existing run in the output folder")
    p.add_argument("--version", action="version", version=f"wfm_ds {__version__}")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    from wfm_ds.distributed.lifecycle import fail_as_rank, strip_launcher_args

    arguments = strip_launcher_args(sys.argv[1:] if argv is None else argv)
    return program(parser(), load_and_run, arguments, fail=fail_as_rank)


def load_and_run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.determinism import deterministic
    from wfm_ds.distributed.logs import quieten_libraries
    from wfm_ds.recipe import file as recipe_file

    stop = lifecycle.install_signal_handlers()
    quieten_libraries()
    choose_accelerator()
    recipe = recipe_file.load(args.recipe, args.overrides)
    with deterministic(recipe.engine.deterministic):
        if args.check:
            return check(recipe, int(os.environ.get("RANK", "0")), overwrite=args.overwrite)
        lifecycle.watch_parent()
        return run(recipe, stop, overwrite=args.overwrite)


def check(recipe: Recipe, rank: int, *, overwrite: bool) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.training.check import check as examine

    if rank == 0:
        # Without a launcher, check for the smallest possible number of ranks.
        world_size = int(os.environ.get("WORLD_SIZE", str(recipe.engine.sequence_parallel)))
        sys.stdout.write(f"{examine(recipe, world_size, overwrite=overwrite)}\n")
        lifecycle.write_status("finished", 0)
    return 0


def run(recipe: Recipe, stop: StopFlag, *, overwrite: bool) -> int:
    """Run the recipe on this rank and return the exit code."""
    import torch.distributed as dist

    from wfm_ds.distributed.lifecycle import write_status
    from wfm_ds.distributed.logs import setup_logging
    from wfm_ds.distributed.world import World
    from wfm_ds.run.ending import watched

    setup_logging(None, int(os.environ.get("RANK", "0")), console=True)
    stuck_s = 60 * recipe.engine.timeout_minutes
    world = World.join(stuck_s + NAMED_FIRST_S)
    with watched(world, stuck_s=stuck_s) as ending:
        outcome, copies = prepare_and_train(recipe, world, stop, ending, overwrite=overwrite)
        is_complete = copies is None or not copies.missing
        if world.is_main and is_complete:
            write_status(outcome.status, outcome.step)
    dist.destroy_process_group()
    return 0 if is_complete else 1


def prepare_and_train(
    recipe: Recipe, world: World, stop: StopFlag, ending: Ending, *, overwrite: bool = False
) -> tuple[Outcome, Copies | None]:
    """Check and load everything on all ranks, then create, clear or open the output folder, and train.

    Returns the outcome of the loop and, with checkpoint.storage, the state of the remote copies. Collective.
    """
    from wfm_ds.distributed.logs import setup_logging
    from wfm_ds.distributed.world import ranks_per_node
    from wfm_ds.recipe.derived import num_replicas
    from wfm_ds.run.ending import take_back
    from wfm_ds.run.folder import locked
    from wfm_ds.run.hub_model import agreed_commit, fetch
    from wfm_ds.run.stored import open_mirror, opened, require_storage

    folder = recipe.run.output_dir
    num_replicas(recipe, world.size, ranks_per_node=ranks_per_node(world.size))
    world = world.in_replicas(recipe.engine.sequence_parallel)
    recipe = agreed_commit(recipe, world, overwrite=overwrite)
    start = agreed_start(recipe, world, overwrite=overwrite)
    if start.finished:
        return finished_before(recipe, world, start)
    fetch(recipe, world)
    world.checked(lambda: require_storage(recipe), on="main")
    build_loop = prepare_loop(recipe, world, stop)
    with contextlib.ExitStack() as lock:
        world.checked(lambda: lock.enter_context(locked(folder)), on="main")
        # Again, because another start of this run may have continued it before the folder was locked.
        start = agreed_start(recipe, world, overwrite=overwrite)
        if start.finished:
            lock.close()
            return finished_before(recipe, world, start)
        mirror = open_mirror(recipe, world)
        start = opened(recipe, world, mirror, start, overwrite=overwrite)
        with ending.recording(take_back(folder, start)):
            setup_logging(folder, world.rank, console=recipe.logging.console)
            return train(recipe, world, build_loop, start, mirror, ending)


def prepare_loop(recipe: Recipe, world: World, stop: StopFlag) -> LoopBuilder:
    """Check the recipe and load its data and model, without writing anything. Returns the loop builder. Collective."""
    from wfm_ds.training import build, language_build

    advised = with_advice(recipe, world)
    if recipe.algorithm.trains_language:
        return language_build.prepare(recipe, world, stop, advised)
    return build.prepare(recipe, world, stop, advised)


def with_advice(recipe: Recipe, world: World) -> AdviceContext:
    """Return a context factory: out-of-memory errors inside its contexts list the recipe keys to change."""
    from wfm_ds.run.out_of_memory import explained

    return functools.partial(explained, world.device, advice_of(recipe, world))


def advice_of(recipe: Recipe, world: World) -> Callable[[str], list[str]]:
    """Return a function from the phase that ran out of memory to the recipe keys to change."""
    from wfm_ds.distributed.world import ranks_per_node
    from wfm_ds.run.fit import advice_for

    return lambda phase: advice_for(recipe, phase, ranks_per_node(world.size))


def finished_before(recipe: Recipe, world: World, start: Start) -> tuple[Outcome, Copies | None]:
    """Log that the run is finished, and upload missing copies. Call it without holding the folder lock."""
    from wfm_ds.run.result import Outcome
    from wfm_ds.run.stored import send_rest

    folder, storage = recipe.run.output_dir, recipe.checkpoint.storage
    location = folder if folder.exists() or storage is None else storage
    log.info("%s: this run finished at step %d, nothing to do", location, start.step)
    return Outcome("finished", start.step), send_rest(recipe, world, start.step)


def agreed_start(recipe: Recipe, world: World, *, overwrite: bool) -> Start:
    """Inspect the output folder on rank 0 and return the result on every rank. Collective."""
    from wfm_ds.run.folder import Start, find_start

    fields = world.checked(lambda: dataclasses.asdict(find_start(recipe, world.size, overwrite=overwrite)), on="main")
    return Start(**world.broadcast(fields))


def train(
    recipe: Recipe,
    world: World,
    build_loop: LoopBuilder,
    start: Start,
    mirror: Mirror | None,
    ending: Ending,
) -> tuple[Outcome, Copies | None]:
    """Build the training loop and run it. Identical result on every rank. Collective."""
    from wfm_ds.run.ending import recorded
    from wfm_ds.run.stored import discard_fetched

    advised = with_advice(recipe, world)
    with contextlib.ExitStack() as building, advised(lambda: "start"):
        loop = build_loop(start, mirror, building)
        if start.checkpoint is not None:
            loop.checkpoints.restore(loop, Path(start.checkpoint))
            discard_fetched(recipe, world)
        world.checked(lambda: mirror.start() if mirror is not None else None, on="main")
        resources = building.pop_all()
    with recorded(ending, recipe, mirror, loop, loop.exporter) as record:
        # Closes all files before waiting for their uploads.
        with page_of(recipe, world), resources, advised(lambda: loop.job.timer.interrupted):
            outcome = loop.run()
        return outcome, record.ended(outcome)


def page_of(recipe: Recipe, world: World) -> AbstractContextManager[None]:
    """Return a context in which a thread on rank 0 updates the HTML page of the run."""
    if not (world.is_main and recipe.logging.page):
        return contextlib.nullcontext()
    import torch

    from wfm_ds.monitoring.run_page import live_page

    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type.upper()
    return live_page(recipe.run.output_dir, devices=f"{world.size} x {device}")


if __name__ == "__main__":
    from wfm_ds.distributed.lifecycle import entry

    entry(main)
