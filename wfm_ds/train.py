"""`deepspeed --num_gpus N -m wfm_ds.train RECIPE [section.key=value ...]`: train a recipe.

Exit codes: 0 if the run finished, WFM_PREEMPTED_CODE (default 0) if a signal stopped it after a step, 2 for an error in
recipe, data, model or reward (prints one `error:` line), 1 for any other error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from wfm_ds import __version__
from wfm_ds.program import CommandParser, collect_garbage_rarely, run_command

if TYPE_CHECKING:
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.ranks import LaunchedRank
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.runs.mirror import Mirror
    from wfm_ds.runs.output_folder import RunStart
    from wfm_ds.runs.shutdown import RunOutcome, RunShutdown
    from wfm_ds.runs.storage_copies import StorageCopies
    from wfm_ds.training.loop import TrainingLoop

    LoopBuilder: TypeAlias = Callable[[RunStart, Mirror | None, ExitStack], TrainingLoop]
    """Builds the training loop of a prepared run. The ExitStack closes its resources. All ranks must call it."""
    AdviceContext: TypeAlias = Callable[[Callable[[], str | None]], AbstractContextManager[None]]
    """Returns a context in which out-of-memory errors list recipe keys to change.

    The argument is a function that returns the current phase."""

log = logging.getLogger("wfm_ds.train")  # __name__ is __main__ with -m

HEARTBEAT_MARGIN_S = 60.0  # collectives time out later than the heartbeat, which reports the cause


def parser() -> CommandParser:
    p = CommandParser(
        prog="python -m wfm_ds.train",
        description="Post-train a diffusers pipeline with a recipe.",
        epilog="Example: deepspeed --num_gpus 8 -m wfm_ds.train recipes/sd3_nft.yaml run.steps=200",
    )
    p.add_recipe_arguments()
    p.add_argument(
        "--tiny", action="store_true", help="two steps on a CPU, with a tiny random model and built-in data and rewards"
    )
    p.add_argument(
        "--check", action="store_true", help="validate recipe, data, model and rewards, print derived numbers, and exit"
    )
    p.add_argument("--overwrite", action="store_true", help="replace an existing run in the output folder")
    p.add_argument("--version", action="version", version=f"wfm_ds {__version__}")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    from wfm_ds.distributed.lifecycle import fail_rank, strip_launcher_args

    arguments = strip_launcher_args(sys.argv[1:] if argv is None else argv)
    return run_command(parser(), load_and_run, arguments, fail=fail_rank)


def load_and_run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.accelerator import choose_accelerator, deterministic_kernels
    from wfm_ds.distributed.logs import quiet_libraries, setup_logging
    from wfm_ds.distributed.ranks import find_launched_rank
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.training.early_checks import check_early

    launched = find_launched_rank(os.environ)
    rank = 0 if launched is None else launched.rank
    preempted_code = lifecycle.read_preempted_code(os.environ)
    stop = lifecycle.install_signal_handlers()
    quiet_libraries()
    world_size = 1 if launched is None else launched.size
    if args.tiny:
        from wfm_ds.demos.tiny_data import load_tiny_recipe

        recipe = load_tiny_recipe(args.recipe, args.overrides, world_size=world_size, announce=rank == 0)
    else:
        recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    if launched is None or launched.local_size == world_size:  # all ranks see the same files and find the same errors
        check_early(recipe, None if args.check else world_size, overwrite=args.overwrite)
    with collect_garbage_rarely():
        choose_accelerator()  # imports torch
    with deterministic_kernels(recipe.engine.deterministic):
        if args.check:
            return run_check(recipe, launched, overwrite=args.overwrite)
        import torch.distributed as dist

        from wfm_ds.distributed.world import World
        from wfm_ds.runs.shutdown import watch_ranks

        lifecycle.watch_parent()
        setup_logging(None, rank, console=True)
        stuck_s = 60 * recipe.engine.timeout_minutes
        world = World.join(stuck_s + HEARTBEAT_MARGIN_S)
        with watch_ranks(world, stuck_s=stuck_s) as ending:
            outcome, copies = prepare_and_train(recipe, world, stop, ending, overwrite=args.overwrite)
            is_complete = copies is None or not copies.missing
            if world.is_main and is_complete:
                lifecycle.write_status(outcome.status, outcome.step)
            world.barrier()  # launchers kill the other ranks as soon as one exits with a code other than 0
        dist.destroy_process_group()
        if is_complete and outcome.status == "preempted":
            return preempted_code
        return 0 if is_complete else 1


def run_check(recipe: Recipe, launched: LaunchedRank | None, *, overwrite: bool) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.training.preflight import check_run as examine

    if launched is None or launched.rank == 0:
        # Without a launcher, check with the minimum number of ranks.
        world_size = recipe.engine.sequence_parallel if launched is None else launched.size
        sys.stdout.write(f"{examine(recipe, world_size, overwrite=overwrite)}\n")
        lifecycle.write_status("finished", 0)
    return 0


def prepare_and_train(
    recipe: Recipe, world: World, stop: StopFlag, ending: RunShutdown, *, overwrite: bool = False
) -> tuple[RunOutcome, StorageCopies | None]:
    """Check the recipe, load model and data, prepare the output folder and train. All ranks must call this.

    Returns (outcome of the run, files that are missing in checkpoint.storage), equal on all ranks. The second value is
    None if checkpoint.storage is not set.
    """
    with collect_garbage_rarely():  # these imports take seconds
        from wfm_ds.distributed.accelerator import ranks_per_node
        from wfm_ds.distributed.logs import setup_logging
        from wfm_ds.models.assets.cache_cleanup import remove_temporary_files
        from wfm_ds.recipe.run_sizes import num_replicas
        from wfm_ds.runs.model_revision import agree_on_commit, fetch_model
        from wfm_ds.runs.output_folder import lock_folder
        from wfm_ds.runs.shutdown import discard_new_run, record_run
        from wfm_ds.runs.storage_copies import open_mirror, open_run_folder, require_writable_storage
        from wfm_ds.training import diffusion_builder, language_builder

    folder = recipe.run.output_dir
    num_replicas(recipe, world.size, ranks_per_node=ranks_per_node(world.size))
    world = world.with_replicas(recipe.engine.sequence_parallel)
    recipe = agree_on_commit(recipe, world, overwrite=overwrite)
    start = find_start_on_all_ranks(recipe, world, overwrite=overwrite)
    if start.is_finished:
        return report_finished_run(recipe, world, start)
    fetch_model(recipe, world)
    if world.local_rank == 0:
        remove_temporary_files(recipe.data.cache_dir, time.time())
    world.run_checked(lambda: require_writable_storage(recipe), on="main")
    trains_language, advised = recipe.algorithm.trains_language, memory_advice_context(recipe, world)
    prepare_run = language_builder.prepare_language_run if trains_language else diffusion_builder.prepare_diffusion_run
    with collect_garbage_rarely():
        # Loads data and model, and writes nothing.
        build_loop: LoopBuilder = prepare_run(recipe, world, stop, advised)
    with contextlib.ExitStack() as lock:
        world.run_checked(lambda: lock.enter_context(lock_folder(folder)), on="main")
        # Check again: another process may have continued this run before the folder was locked.
        start = find_start_on_all_ranks(recipe, world, overwrite=overwrite)
        if start.is_finished:
            lock.close()
            return report_finished_run(recipe, world, start)
        mirror = open_mirror(recipe, world)
        start = open_run_folder(recipe, world, mirror, start, overwrite=overwrite)
        with ending.use_recorder(discard_new_run(folder, start)):
            setup_logging(folder, world.rank, console=recipe.logging.console)
            with collect_garbage_rarely(), advised(lambda: "start"):
                loop, resources = open_loop(recipe, world, build_loop, start, mirror)
            with record_run(ending, recipe, mirror, loop, loop.exporter) as record:
                # Close all files before waiting for their uploads.
                with run_page_context(recipe, world), resources, advised(lambda: loop.job.timer.interrupted_phase):
                    outcome = loop.run_to_end()
                return outcome, record.record_outcome(outcome)


def open_loop(
    recipe: Recipe, world: World, build_loop: LoopBuilder, start: RunStart, mirror: Mirror | None
) -> tuple[TrainingLoop, ExitStack]:
    """Build the training loop, restore the starting checkpoint and start the uploads. All ranks must call this.

    Returns (loop, resources to close after training).
    """
    from wfm_ds.runs.storage_copies import discard_fetched_checkpoint

    with contextlib.ExitStack() as building:
        loop = build_loop(start, mirror, building)
        if start.checkpoint is not None:
            loop.checkpoints.restore_run(loop, Path(start.checkpoint))
            discard_fetched_checkpoint(recipe, world)
        world.run_checked(lambda: mirror.start() if mirror is not None else None, on="main")
        return loop, building.pop_all()


def memory_advice_context(recipe: Recipe, world: World) -> AdviceContext:
    from wfm_ds.distributed.accelerator import ranks_per_node
    from wfm_ds.memory.advice import explain_out_of_memory, suggest_keys_after_oom

    num_local_ranks = ranks_per_node(world.size)
    return functools.partial(
        explain_out_of_memory, world.device, lambda phase: suggest_keys_after_oom(recipe, phase, num_local_ranks)
    )


def report_finished_run(recipe: Recipe, world: World, start: RunStart) -> tuple[RunOutcome, StorageCopies | None]:
    """Log that the run has finished, and upload missing files. The caller must not hold the output folder's lock."""
    from wfm_ds.runs.shutdown import RunOutcome
    from wfm_ds.runs.storage_copies import send_missing_copies

    folder, storage = recipe.run.output_dir, recipe.checkpoint.storage
    location = folder if folder.exists() or storage is None else storage
    log.info("%s: this run finished at step %d, nothing to do", location, start.step)
    return RunOutcome("finished", start.step), send_missing_copies(recipe, world, start.step)


def find_start_on_all_ranks(recipe: Recipe, world: World, *, overwrite: bool) -> RunStart:
    """Determine the starting step and checkpoint on rank 0, and return them on all ranks. All ranks must call this."""
    from wfm_ds.runs.output_folder import RunStart, find_run_start

    fields = world.run_checked(
        lambda: dataclasses.asdict(find_run_start(recipe, world.size, overwrite=overwrite)), on="main"
    )
    return RunStart(**world.broadcast(fields))


def run_page_context(recipe: Recipe, world: World) -> AbstractContextManager[None]:
    """Return a context in which a thread of rank 0 updates the run's HTML page."""
    if not (world.is_main and recipe.logging.page):
        return contextlib.nullcontext()
    import torch

    from wfm_ds.monitoring.run_page import update_page_live

    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type.upper()
    return update_page_live(recipe.run.output_dir, devices=f"{world.size} x {device}")


if __name__ == "__main__":
    from wfm_ds.distributed.lifecycle import run_and_exit

    run_and_exit(main)
