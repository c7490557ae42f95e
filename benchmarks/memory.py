"""Estimate the GPU memory that each shipped recipe needs, with the dimensions of the released models.

python -m benchmarks.memory RECIPE...            all parts and phases
python -m benchmarks.memory --statements         the estimate line of each recipe's header
python -m benchmarks.memory --precisions RECIPE  the memory that each model.base_precision saves for a LoRA recipe
python -m benchmarks.memory RECIPE --set engine.deepspeed=zero2     with overrides

No model runs, and weights are not needed (wfm_ds/memory/estimate.py). A test compares the headers of the recipes with
these estimates.
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
from wfm_ds.memory.advice import fits_memory, memory_verdict
from wfm_ds.memory.estimate import MemoryEstimate, estimate_memory, format_memory_table
from wfm_ds.monitoring.meters import GIB
from wfm_ds.program import run_command
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import BasePrecision

PRECISIONS: tuple[BasePrecision | None, ...] = (None, "fp8", "nf4")  # int8 needs the same as fp8

RECIPES = Path(__file__).parent.parent / "recipes"
COMMAND = re.compile(r"^#\s+deepspeed --num_gpus (\d+) ", re.MULTILINE)
STATEMENT = re.compile(r"^# (\d+) GPUs of (\d+) GB: (\d+) GiB per rank \(estimate, docs/memory\.md\)$", re.MULTILINE)
DEFAULT_GPUS = 8
GPU_GB = 80  # GPU memory that the recipes are written for
BFLOAT16 = 2


def list_shipped_recipes() -> list[Path]:
    """Return the full-size recipes of diffusion models. Memory of language models depends on the data (`--check`)."""
    found = sorted(RECIPES.glob("*.yaml"))
    return [path for path in found if not recipe_file.load_recipe(path, []).algorithm.trains_language]


def estimate_released(recipe: Recipe, world_size: int) -> MemoryEstimate:
    """Estimate a recipe of a released model, found by its folder name. Raises RecipeError for other models."""
    name = Path(recipe.model.path).name
    known = next((model for model in RELEASED.values() if model.folder == name), None)
    if known is None:
        raise RecipeError(f"model.path {recipe.model.path}: {name} is not in benchmarks/released.py")
    model = known.load()
    model.input_names, model.source_size = frozenset(recipe.data.inputs), recipe.data.source_size
    model.max_sequence_length = recipe.model.max_sequence_length or model.max_sequence_length
    encoder_bytes = known.text_parameters * BFLOAT16
    keeps_encoders = bool(model.text_inputs & model.input_names)  # texts depend on the images of the samples
    return estimate_memory(recipe, model, world_size, encoder_bytes=encoder_bytes, keeps_encoders=keeps_encoders)


def num_gpus(recipe_path: Path) -> int:
    """Return the number of GPUs in the command of a recipe's header (default: eight)."""
    found = COMMAND.search(recipe_path.read_text(encoding="utf-8"))
    return int(found[1]) if found else DEFAULT_GPUS


def make_statement(recipe_path: Path) -> str:
    """Return the estimate line for a recipe's header. Raises RecipeError if the peak does not fit."""
    found = estimate_released(recipe_file.load_recipe(recipe_path, []), num_gpus(recipe_path))
    if not fits_memory(found.peak_bytes, GPU_GB * 10**9):
        raise RecipeError(f"{recipe_path}: {found.peak_bytes / GIB:.0f} GiB do not fit into a GPU with {GPU_GB} GB")
    return (
        f"# {found.world_size} GPUs of {GPU_GB} GB: {math.ceil(found.peak_bytes / GIB)} GiB per rank (estimate, "
        "docs/memory.md)"
    )


def precisions_row(recipe_path: Path, overrides: Sequence[str], world_size: int) -> str:
    """Return a Markdown table row: GiB of a rank's weights and of its peak, for each of PRECISIONS."""
    cells = []
    for precision in PRECISIONS:
        chosen = [] if precision is None else [f"model.base_precision={precision}"]
        found = estimate_released(recipe_file.load_recipe(recipe_path, [*overrides, *chosen]), world_size)
        weights = found.phases[found.peak_phase]["weights"] / GIB
        cells.append(f"{weights:.1f} of {found.peak_bytes / GIB:.1f}")
    return f"| `{recipe_path.name}` | {' | '.join(cells)} |"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="benchmarks.memory", description="Estimate the memory that recipes need.")
    p.add_argument("recipes", nargs="*", type=Path, help="recipes of released models (default: all shipped recipes)")
    p.add_argument("--ranks", type=int, help="default: the GPUs of the command in the recipe's header")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the recipe")
    p.add_argument("--statements", action="store_true", help="print only the lines for the recipes' headers")
    p.add_argument("--precisions", action="store_true", help="print the memory that each model.base_precision saves")
    return p


def print_estimates(args: argparse.Namespace) -> int:
    for path in args.recipes or list_shipped_recipes():
        if args.statements:
            sys.stdout.write(f"{path.name}\n{make_statement(path)}\n")
            continue
        if args.precisions:
            sys.stdout.write(precisions_row(path, args.set, args.ranks or num_gpus(path)) + "\n")
            continue
        recipe = recipe_file.load_recipe(path, args.set)
        found = estimate_released(recipe, args.ranks or num_gpus(path))
        lines = [path.name, *format_memory_table(found), memory_verdict(recipe, found, None)]
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(parser(), print_estimates, argv)


if __name__ == "__main__":
    sys.exit(main())
