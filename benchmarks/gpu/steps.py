"""Steps of real runs, measured: `python -m benchmarks.gpu steps RECIPE ... --variants NAME,NAME --json FILE`.

Each recipe runs in this process as `wfm_ds.train` would run it, once for each variant, with mock rewards and without
evaluations and exports: one step to warm up, `--steps` measured ones, one whose waits for the device are counted and
one whose kernel launches are. A variant that fails, or that the recipe, the device or a
missing package refuses, gives a row that says so, and the next one begins.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import counted, runs
from benchmarks.gpu.variants import Variant, chosen
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import UserError
from wfm_ds.monitoring.stopwatch import GIB, MEMORY_TAG
from wfm_ds.training.speed import TERA

TIME = "time/"


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `run` found, or how it failed, or why it was refused: a table is worth having with a gap."""
    try:
        return run()
    except UserError as error:
        return {"refused": str(error)[:300]}
    except Exception as error:  # noqa: BLE001, whatever a variant dies of is its row
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    finally:
        runs.release()


def measured(
    recipe: Path, variant: Variant, overrides: Sequence[str], steps: int, peak: float | None
) -> dict[str, Any]:
    with runs.environment(variant.environment), runs.opened(recipe, [*overrides, *variant.overrides]) as run:
        row: dict[str, Any] = {"first step s": runs.timed(run.step)}
        before = len(run.lines())
        run.phases.work.clear()
        for _ in range(steps):
            run.step()
        row |= columns(run, run.lines()[before:], peak)
        with counted.host_syncs() as places:
            run.step()
        row |= {"host syncs": places.total(), "host syncs at": counted.busiest(places)} if places else {}
        row |= counted.launches(run.step)
    return row


def columns(run: runs.Opened, lines: Sequence[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Seconds by phase, samples, FLOPs and memory of the measured steps."""
    job = run.loop.job
    seconds = {name: [line[name] for line in lines] for name in lines[0] if name.startswith(TIME)}
    step_s = seconds.pop(TIME + "step")
    found: dict[str, Any] = {"step s": spread(step_s)}
    found |= {f"{name.removeprefix(TIME)} s": statistics.median(values) for name, values in seconds.items()}
    found["samples/s"] = statistics.median(line["perf/samples_per_second"] for line in lines)
    peak = peak or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    needed = sum(work.required for work in run.phases.work.values())
    all_of_it = needed + sum(work.recomputed for work in run.phases.work.values())
    found["TFLOP/s"] = all_of_it / sum(step_s) / TERA
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
    # On a GPU, by phase: what tensors took. Without a phase: what was reserved for them.
    of_phases = [max(line[name] for line in lines) for name in lines[0] if name.startswith(f"{MEMORY_TAG}/")]
    if of_phases:
        found["allocated GiB"] = max(of_phases)
        found["allocated / estimated"] = found["allocated GiB"] / found["estimated GiB"]
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """The arguments that `rows` reads."""
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--variants", default="as shipped", help="comma-separated (default: as shipped)")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="changes to every recipe")


def rows(args: argparse.Namespace, measure: Callable[[Path, Variant], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what `measure` finds of each recipe with each variant, or how it failed."""
    for recipe in args.recipes:
        for name, variant in chosen(args.variants).items():
            row = tried(functools.partial(measure, recipe, variant))
            yield {"recipe": recipe.stem, "variant": name, **row}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipes(parser)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="of the device, where its name does not say it")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return rows(args, lambda recipe, variant: measured(recipe, variant, args.set, args.steps, args.peak_tflops))
