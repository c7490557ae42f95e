"""`wfm data prepare RECIPE [section.key=value ...]`: fill the cache of text embeddings and latents.

Existing entries are kept. Under the `deepspeed` launcher, the ranks divide the work. The exit codes are the same as in
wfm_ds.train.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wfm_ds.errors import RecipeError
from wfm_ds.program import CommandParser, run_command

if TYPE_CHECKING:
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe.schema import Recipe

TIMEOUT_S = 24 * 3600.0  # maximum wait for the slowest rank


def parser() -> CommandParser:
    p = CommandParser(
        prog="wfm data prepare", description="Fill data.cache_dir with the text embeddings and latents of a recipe."
    )
    p.add_recipe_arguments()
    return p


def main(argv: Sequence[str] | None = None) -> int:
    from wfm_ds.distributed.lifecycle import fail_rank, strip_launcher_args

    arguments = strip_launcher_args(sys.argv[1:] if argv is None else argv)
    return run_command(parser(), run, arguments, fail=fail_rank)


def run(args: argparse.Namespace) -> int:
    from wfm_ds.distributed import lifecycle
    from wfm_ds.distributed.accelerator import choose_accelerator
    from wfm_ds.distributed.logs import quiet_libraries
    from wfm_ds.recipe import file as recipe_file

    quiet_libraries()
    choose_accelerator()
    recipe = recipe_file.load_recipe(args.recipe, args.overrides)
    if recipe.data.cache_dir is None:
        raise RecipeError(f"{args.recipe}: nothing to prepare, data.cache_dir is not set")
    if recipe.data.streaming:
        raise RecipeError(f"{args.recipe}: nothing to prepare, data.streaming does not know the samples in advance")
    lifecycle.watch_parent()
    import torch.distributed as dist

    from wfm_ds.distributed.world import World

    world = World.join(TIMEOUT_S)
    summary = fill_caches(recipe, world)
    if world.is_main:
        sys.stdout.write(summary + "\n")
        lifecycle.write_status("finished", 0)
    dist.destroy_process_group()
    return 0


def fill_caches(recipe: Recipe, world: World) -> str:
    """Fill the caches of text embeddings and latents, and return a summary. All ranks must call this.

    If one rank raises UserError, all ranks raise it.
    """
    from wfm_ds.data.broadcast import read_on_main
    from wfm_ds.data.datasets import load_data
    from wfm_ds.memory.advice import explain_out_of_memory, suggest_part_keys
    from wfm_ds.models.assets.cache_cleanup import remove_temporary_files
    from wfm_ds.runs.model_loading import load_model
    from wfm_ds.runs.model_revision import agree_on_commit, fetch_model
    from wfm_ds.training.caches import CacheFiller
    from wfm_ds.training.diffusion_builder import mark_frozen_layers

    explain = explain_out_of_memory(
        world.device, lambda phase: suggest_part_keys("activations", "encode", recipe), lambda: None
    )
    recipe = agree_on_commit(recipe, world, overwrite=False)
    fetch_model(recipe, world)
    if world.local_rank == 0:
        remove_temporary_files(recipe.data.cache_dir, time.time())
    data = read_on_main(world, lambda: load_data(recipe))
    model = world.run_checked(explain(lambda: load_model(recipe, world.device)))
    mark_frozen_layers(model, recipe)
    filler = world.run_checked(lambda: CacheFiller(recipe, model, data, world.rank, world.size))
    counts = world.sum_over_ranks(world.run_checked(explain(filler.fill_caches)))
    return (
        f"{recipe.data.cache_dir}: {counts['new']:.0f} entries written, {counts['kept']:.0f} already cached, "
        f"{counts['bad']:.0f} invalid images or videos"
    )


if __name__ == "__main__":
    from wfm_ds.distributed.lifecycle import run_and_exit

    run_and_exit(main)
