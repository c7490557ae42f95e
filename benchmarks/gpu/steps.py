"""Measure steps of real runs: `python -m benchmarks.gpu steps RECIPE ... --variants NAME,NAME --json FILE`.

Each recipe runs in this process like in `wfm_ds.train`, for each variant, with mock rewards and without evaluations and
exports: a warm-up step, `--steps` measured steps, and, without `--no-counts`, one step to count waits for the device,
and one step to count kernel launches. If a variant fails, or is not supported by the recipe, the device or the
installed packages, its row contains the reason, and the next variant starts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import host_counts, runs
from benchmarks.gpu.variants import RecipeVariant, select_variants
from benchmarks.report import summarize
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import UserError
from wfm_ds.monitoring.meters import GIB, MEMORY_TAG
from wfm_ds.recipe.schema import Recipe
from wfm_ds.training.loop import TERA

TIME = "time/"


def try_measurement(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `run`, or a row with its error, so that a table can have gaps."""
    try:
        return run()
    except UserError as error:
        return {"refused": str(error)[:300]}
    except Exception as error:  # noqa: BLE001, any error of a variant becomes its row
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        runs.release_memory()


def measure_steps(
    recipe: Path, variant: RecipeVariant, overrides: Sequence[str], steps: int, peak: float | None, *, counts: bool
) -> dict[str, Any]:
    overrides = [*overrides, *variant.overrides, *([] if peak is None else [f"logging.peak_tflops={peak}"])]
    with runs.set_environment(variant.environment), runs.open_run(recipe, overrides) as run:
        row: dict[str, Any] = {"first step s": runs.time_call(run.run_step)}
        before = len(run.metric_lines())
        run.phases.work.clear()
        for _ in range(steps):
            run.run_step()
        row |= step_columns(run, run.metric_lines()[before:], peak)
        if not counts:
            return row
        with host_counts.count_host_syncs() as places:
            run.run_step()
        row |= {"host syncs": places.total(), "host syncs at": host_counts.format_busiest(places)} if places else {}
        row |= host_counts.count_launches(run.run_step)
    return row


def step_columns(run: runs.OpenRun, lines: Sequence[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Return seconds by phase, samples, FLOPs and memory of the measured steps."""
    job = run.loop.job
    seconds = {name: [line[name] for line in lines] for name in lines[0] if name.startswith(TIME)}
    step_s = seconds.pop(TIME + "step")
    found: dict[str, Any] = {"samples": samples_per_step(job.recipe), "step s": summarize(step_s)}
    found |= {f"{name.removeprefix(TIME)} s": statistics.median(values) for name, values in seconds.items()}
    found["samples/s"] = statistics.median(line["perf/samples_per_second"] for line in lines)
    peak = peak or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    needed = sum(work.required for work in run.phases.work.values())
    all_flops = needed + sum(work.recomputed for work in run.phases.work.values())
    if all_flops:  # a run on a CPU counts them only with a peak
        found["TFLOP/s"] = all_flops / sum(step_s) / TERA
    if peak is not None:
        found["MFU"] = needed / sum(step_s) / TERA / peak
        for phase, work in run.phases.work.items():
            if work.required:
                found[f"{phase} MFU"] = work.required / sum(seconds[TIME + phase]) / TERA / peak
    found |= {
        name.removeprefix("perf/"): max(line[name] for line in lines)
        for name in lines[0]
        if name.startswith(MEMORY_TAG)
    }
    found["estimated GiB"] = run.estimated_bytes / GIB
    # On a GPU, tags with a phase are allocated memory; the tag without a phase is reserved memory.
    of_phases = [max(line[name] for line in lines) for name in lines[0] if name.startswith(f"{MEMORY_TAG}/")]
    if of_phases:
        found["allocated GiB"] = max(of_phases)
        found["allocated / estimated"] = found["allocated GiB"] / found["estimated GiB"]
        found["reserved / estimated"] = found["peak_memory_gib"] / found["estimated GiB"]
    return found


def samples_per_step(recipe: Recipe) -> int:
    """Return the samples of a step on one GPU: generated samples for RL, else training samples."""
    if recipe.is_rl:
        return recipe.rl.rollout.prompts_per_step * recipe.rl.rollout.group_size
    return recipe.engine.micro_batch_size * recipe.engine.gradient_accumulation


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `variant_rows` reads."""
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--variants", default="as shipped", help="comma-separated (default: as shipped)")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="overrides for every recipe")


def variant_rows(
    args: argparse.Namespace, measure: Callable[[Path, RecipeVariant], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the result of `measure` for each recipe and variant, or its error."""
    for recipe in args.recipes:
        for name, variant in select_variants(args.variants).items():
            row = try_measurement(functools.partial(measure, recipe, variant))
            yield {"recipe": recipe.stem, "variant": name, **row}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipes(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="peak of the device, if its name is unknown")
    parser.add_argument(
        "--no-counts", action="store_true", help="do not count waits and launches, which takes two steps"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def measure(recipe: Path, variant: RecipeVariant) -> dict[str, Any]:
        counts = not args.no_counts
        return measure_steps(recipe, variant, args.set, args.steps, args.peak_tflops, counts=counts)

    return variant_rows(args, measure)
