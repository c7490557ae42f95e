"""`deepspeed --num_gpus N -m wfm_ds.train RECIPE [section.key=value ...]`: one recipe, one run.

Exit codes: 0 finished, or stopped on request at a step boundary; 2 recipe, data, model or reward error (one message);
1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wfm_ds import __version__
from wfm_ds.errors import RunError, UserError
from wfm_ds.program import program

if TYPE_CHECKING:
    from wfm_ds.data.datasets import TrainingData
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.models.base import DiffusionModel
    from wfm_ds.recipe.schema import Recipe
    from wfm_ds.run.ending import Ending
    from wfm_ds.run.folder import Start
    from wfm_ds.run.result import Outcome
    from wfm_ds.training.loop import Loop

log = logging.getLogger("wfm_ds.train")  # run with -m, __name__ is another

NAMED_FIRST_S = 60.0  # an exchange breaks so much later than the heartbeat can say why


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="wfm_ds.train",
        description="Post-train a diffusers pipeline as a recipe says.",
        epilog="Example: deepspeed --num_gpus 8 -m wfm_ds.train recipes/sd3_nft.yaml run.steps=200",
    )
    p.add_argument("recipe", type=Path, help="a YAML recipe (docs/recipes.md)")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the recipe's")
    p.add_argument("--check", action="store_true", help="validate recipe, data, model, rewards; print numbers")
    p.add_argument("--overwrite", action="store_true", help="replace a run that is in the output folder already")
    p.add_argument("--version", action="version", version=f"wfm_ds {__version__}")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    from wfm_ds.distributed.lifecycle import fail_as_rank, strip_launcher_args

    words = strip_launcher_args(sys.argv[1:] if argv is None else argv)
    return program(parser(), load_and_run, words, fail=fail_as_rank)


def load_and_run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quieten_libraries
    from wfm_ds.recipe import file as recipe_file

    stop = lifecycle.install_signal_handlers()
    quieten_libraries()
    choose_accelerator()
    recipe = recipe_file.load(args.recipe, args.overrides)
    if args.check:
        return check(recipe, int(os.environ.get("RANK", "0")), overwrite=args.overwrite)
    lifecycle.watch_parent()
    return run(recipe, stop, overwrite=args.overwrite)


def check(recipe: Recipe, rank: int, *, overwrite: bool) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.training.preflight import report

    if rank == 0:
        # Without a launcher: as for the fewest ranks that can run it.
        world_size = int(os.environ.get("WORLD_SIZE", str(recipe.engine.sequence_parallel)))
        sys.stdout.write(report(recipe, world_size, overwrite=overwrite) + "\n")
        lifecycle.write_status("finished", 0)
    return 0


def run(recipe: Recipe, stop: StopFlag, *, overwrite: bool) -> int:
    """The whole run on this rank; returns the exit code."""
    import torch.distributed as dist

    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.heartbeat import start
    from wfm_ds.distributed.logs import setup_logging
    from wfm_ds.distributed.world import World
    from wfm_ds.run.ending import Ending

    setup_logging(None, int(os.environ.get("RANK", "0")), console=True)
    stuck_s = 60 * recipe.engine.timeout_minutes
    world = World.join(stuck_s + NAMED_FIRST_S)
    ending = Ending(recipe.run.output_dir, world)
    try:
        # Who is ended by another rank's error has that one's exit code: the launcher reports whichever it sees first.
        ending.heartbeat = start(
            world, stuck_s=stuck_s, on_end=ending.judged, exit_process=lambda _: os._exit(ending.error_code)
        )
        outcome = prepare_and_train(recipe, world, stop, ending, overwrite=overwrite)
    except UserError as error:
        if world.size == 1 or error.agreed:
            ending.failed(str(error))
            lifecycle.user_error_exit(str(error), world.rank)
        lifecycle.user_error_exit(str(error), world.rank, speaks=ending.failed_alone(error))
    except RunError as error:
        log.error("%s", error)
        ending.failed(str(error))
        return 1
    except Exception as error:
        # The border of the process: what nobody expected is recorded and then shown in full.
        if ending.unexpected(error):
            return ending.error_code
        raise
    ending.reached(outcome)
    dist.destroy_process_group()
    return ending.exit_code


def prepare_and_train(
    recipe: Recipe, world: World, stop: StopFlag, ending: Ending, *, overwrite: bool = False
) -> Outcome:
    """Check and load everything on all ranks, only then create, clear or open the output folder, and train."""
    from wfm_ds.data.shared import read_on_main
    from wfm_ds.distributed.logs import setup_logging
    from wfm_ds.distributed.world import ranks_per_node
    from wfm_ds.recipe.derived import num_replicas
    from wfm_ds.run.folder import locked
    from wfm_ds.run.model import load_model
    from wfm_ds.run.stored import finish, open_mirror, opened, require_storage
    from wfm_ds.training.build import reward_endpoint
    from wfm_ds.training.preflight import preflight

    folder = recipe.run.output_dir
    num_replicas(recipe, world.size, ranks_per_node=ranks_per_node(world.size))
    world = world.in_replicas(recipe.engine.sequence_parallel)
    start = agreed_start(recipe, world, overwrite=overwrite)
    if start.finished:
        return finished_before(recipe, world, start, ending)
    world.checked(lambda: require_storage(recipe), on="main")
    data = read_on_main(world, lambda: preflight(recipe, world.size))
    model = world.checked(lambda: load_model(recipe, world.device))
    drawn = [prompt.text for prompt in (*data.prompts, *data.shown)]
    world.checked(lambda: model.check_prompts(drawn[world.rank :: world.size]))
    with contextlib.ExitStack() as held:
        world.checked(lambda: held.enter_context(locked(folder)), on="main")
        # Once more: until the folder was locked, another start of this run may have gone on in it.
        start = agreed_start(recipe, world, overwrite=overwrite)
        if start.finished:
            held.close()
            return finished_before(recipe, world, start, ending)
        mirror = open_mirror(recipe, world)
        start = opened(recipe, world, mirror, start, overwrite=overwrite)
        ending.start, ending.mirror = start, mirror
        setup_logging(folder, world.rank, console=recipe.logging.console)
        endpoint = held.enter_context(reward_endpoint(recipe, world))
        try:
            outcome = train(recipe, world, stop, model, data, endpoint, ending)
        except (RunError, UserError) as error:
            if (error.agreed or world.size == 1) and ending.loop is not None:
                ending.copies = finish(recipe, world, mirror)
            raise
        ending.copies = finish(recipe, world, mirror)
        return outcome


def finished_before(recipe: Recipe, world: World, start: Start, ending: Ending) -> Outcome:
    """Say that there is nothing to do, and send to the storage what it lacks. The caller does not hold the lock."""
    from wfm_ds.run.result import Outcome
    from wfm_ds.run.stored import send_rest

    folder, storage = recipe.run.output_dir, recipe.checkpoint.storage
    where = folder if folder.exists() or storage is None else storage
    log.info("%s holds this run, finished with step %d: nothing to do", where, start.step)
    ending.copies = send_rest(recipe, world, start.step)
    return Outcome("finished", start.step)


def agreed_start(recipe: Recipe, world: World, *, overwrite: bool) -> Start:
    """Rank 0's view of the output folder, on every rank."""
    from wfm_ds.run.folder import Start, find_start

    found = world.checked(lambda: dataclasses.asdict(find_start(recipe, world.size, overwrite=overwrite)), on="main")
    return Start(**world.broadcast(found))


def train(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    model: DiffusionModel,
    data: TrainingData,
    endpoint: str | None,
    ending: Ending,
) -> Outcome:
    """Wrap the denoiser, run the recipe's loop, evaluate and export. Every rank returns the same outcome."""
    from wfm_ds.run.stored import discard_fetched
    from wfm_ds.training.build import open_job, reinforcement, rl_algorithm, supervision
    from wfm_ds.training.checkpoints import Checkpoints
    from wfm_ds.training.exporter import Exporter

    start = ending.start
    assert start is not None
    algorithm = rl_algorithm(recipe, model)
    with contextlib.ExitStack() as resources:
        job = open_job(recipe, world, stop, model, data, start, resources)
        job.mirror = ending.mirror
        exporter, checkpoints = Exporter(job), Checkpoints(job)
        loop: Loop
        if algorithm is not None:
            loop = reinforcement(job, algorithm, data, exporter, checkpoints, endpoint, resources)
        else:
            loop = supervision(job, data, exporter, checkpoints, resources)
        if start.checkpoint is not None:
            checkpoints.restore(loop, Path(start.checkpoint))
            discard_fetched(recipe, world)
        world.checked(lambda: ending.mirror.start() if ending.mirror is not None else None, on="main")
        ending.loop, ending.exporter = loop, exporter
        try:
            outcome = loop.run()
        except RunError:  # raised on all ranks alike; the weights are those of the last good step
            checkpoints.finish()
            exporter.at_end(loop.step)
            raise
        checkpoints.finish()
        exporter.at_end(outcome.step)
        # Who asks a run to stop does not wait for an evaluation.
        evaluation = loop.validator.at_end(outcome.step) if outcome.status == "finished" else {}
        job.monitor.message(
            f"{outcome.status} at step {outcome.step}; result in {recipe.run.output_dir / 'result.json'}"
        )
    return dataclasses.replace(outcome, metrics={**outcome.metrics, **evaluation})


if __name__ == "__main__":
    from wfm_ds.distributed.lifecycle import entry

    entry(main)
