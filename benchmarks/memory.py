"""The GPU that each shipped recipe needs, by the estimate at the released models' dimensions.

python -m benchmarks.memory RECIPE...            part by part and phase by phase
python -m benchmarks.memory --statements         the line that each recipe says it in, as it should be
python -m benchmarks.memory --precisions RECIPE  what each model.base_precision saves a LoRA recipe
python -m benchmarks.memory RECIPE --set engine.deepspeed=zero2     with other values than the recipe's

Nothing is computed and no weights are needed (wfm_ds/run/memory_estimate.py). A test holds the recipes to it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.released import RELEASED
from wfm_ds.errors import RecipeError
from wfm_ds.monitoring.stopwatch import GIB
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import BasePrecision
from wfm_ds.run.memory_advice import fits_memory, memory_verdict
from wfm_ds.run.memory_estimate import MemoryEstimate, estimate_memory, format_memory_table

PRECISIONS: tuple[BasePrecision | None, ...] = (None, "fp8", "nf4")  # int8 takes what fp8 does

RECIPES = Path(__file__).parent.parent / "recipes"
COMMAND = re.compile(r"^#\s+deepspeed --num_gpus (\d+) ", re.MULTILINE)
STATEMENT = re.compile(r"^# (\d+) x (\d+) GB: (\d+) GiB a rank \(estimated, docs/memory\.md\)$", re.MULTILINE)
DEFAULT_GPUS = 8
GPU_GB = 80  # of the GPUs that the recipes are written for
BFLOAT16 = 2


def shipped() -> list[Path]:
    """The full-size recipes of diffusion models: that of language models depends on the data (`--check`)."""
    found = sorted(RECIPES.glob("*.yaml"))
    return [path for path in found if not recipe_file.load_recipe(path, []).algorithm.trains_language]


def released_estimate(recipe: Recipe, world_size: int) -> MemoryEstimate:
    """Estimate a recipe whose model is a released one, known by its folder's name. Raises RecipeError for others."""
    name = Path(recipe.model.path).name
    known = next((model for model in RELEASED.values() if model.folder == name), None)
    if known is None:
        raise RecipeError(
            f"model.path {recipe.model.path}: {name} is no released model that benchmarks/released.py has"
        )
    model = known.load()
    model.input_names = frozenset(recipe.data.inputs)
    model.max_sequence_length = recipe.model.max_sequence_length or model.max_sequence_length
    return estimate_memory(recipe, model, world_size, encoder_bytes=known.text_parameters * BFLOAT16)


def num_gpus(recipe_path: Path) -> int:
    """GPUs of the command in a recipe's header; eight unless it says so."""
    found = COMMAND.search(recipe_path.read_text(encoding="utf-8"))
    return int(found[1]) if found else DEFAULT_GPUS


def statement(recipe_path: Path) -> str:
    """The line of a recipe's header, as it should be. Raises RecipeError where the peak does not fit."""
    found = released_estimate(recipe_file.load_recipe(recipe_path, []), num_gpus(recipe_path))
    if not fits_memory(found.peak_bytes, GPU_GB * 10**9):
        raise RecipeError(f"{recipe_path}: {found.peak_bytes / GIB:.0f} GiB do not fit a GPU of {GPU_GB} GB")
    return (
        f"# {found.world_size} x {GPU_GB} GB: {math.ceil(found.peak_bytes / GIB)} GiB a rank (estimated, "
        "docs/memory.md)"
    )


def precisions_row(recipe_path: Path, overrides: Sequence[str], world_size: int) -> str:
    """GiB of a rank's weights and of its peak for each of PRECISIONS, as a row of a Markdown table."""
    cells = []
    for precision in PRECISIONS:
        chosen = [] if precision is None else [f"model.base_precision={precision}"]
        found = released_estimate(recipe_file.load_recipe(recipe_path, [*overrides, *chosen]), world_size)
        weights = found.phases[found.peak_phase]["weights"] / GIB
        cells.append(f"{weights:.1f} of {found.peak_bytes / GIB:.1f}")
    return f"| `{recipe_path.name}` | {' | '.join(cells)} |"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.memory", description="Estimate the memory that recipes need.")
    p.add_argument("recipes", nargs="*", type=Path, help="recipes of released models (default: all that are shipped)")
    p.add_argument("--ranks", type=int, help="default: the GPUs of the command in the recipe's header")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a value that replaces the recipe's")
    p.add_argument("--statements", action="store_true", help="print the lines of the recipes' headers alone")
    p.add_argument("--precisions", action="store_true", help="print what each model.base_precision saves")
    return p


def run(args: argparse.Namespace) -> int:
    for path in args.recipes or shipped():
        if args.statements:
            sys.stdout.write(f"{path.name}\n{statement(path)}\n")
            continue
        if args.precisions:
            sys.stdout.write(precisions_row(path, args.set, args.ranks or num_gpus(path)) + "\n")
            continue
        recipe = recipe_file.load_recipe(path, args.set)
        found = released_estimate(recipe, args.ranks or num_gpus(path))
        lines = [path.name, *format_memory_table(found), memory_verdict(recipe, found, None)]
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
