"""Processor time of an SFT step compared with a minimal loop: `python -m benchmarks.overhead [--pairs 30] [--write]`.

Both loops train one model with one DeepSpeed engine on the same images in one process. Our loop is that of a run (data
order, keyed noise, metrics, checkpoint checks); the minimal loop is plain torch. Everything runs on one rank and one
core: with a second core for reading ahead, both cores become slower, and the same work needs more processor time. The
loops alternate in short blocks, and every other pair starts with ours, so that a slowdown of the machine affects both.
A block ends after its threads have finished reading ahead. The ratio is the median over the pairs; the interval
contains the true median with 95 % probability.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

RECIPE = Path(__file__).parent.parent / "tests" / "recipes" / "sd3_sft.yaml"
BLOCK_S = 0.3  # approximate processor time of a block; load changes more slowly
WARM_UP = 3  # steps of each loop before measuring
CASES = {
    "tiny": ([], 1.15),
    "mid": (["sampling.height=64", "sampling.width=64", "engine.micro_batch_size=16", "data.max_upscale=8"], 1.03),
}
COMMON = [
    *("ema=null", "validation.every=0", "validation.at_start=false", "validation.holdout=0", "checkpoint.every=0"),
    *("data.caption_dropout=0", "logging.console=false", "logging.sample_every=0", "optimizer.lr=1e-5"),
]


def open_loop(folder: Path, case: Sequence[str], held: contextlib.ExitStack) -> tuple[Any, Sequence[Any]]:
    """Build the loop of a run with everything around it, before its first step. Return it and its samples."""
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.runs.model_loading import load_model
    from wfm_ds.runs.output_folder import RunStart
    from wfm_ds.training.diffusion_builder import build_diffusion_loop
    from wfm_ds.training.preflight import check_and_load_data

    paths = [f"run.output_dir={folder / 'run'}", f"data.path={folder / 'digits' / 'images'}", "run.steps=100000"]
    recipe = recipe_file.load_recipe(RECIPE, [*paths, *COMMON, *case])
    world = World.join()
    data, model = check_and_load_data(recipe, world.size), load_model(recipe, world.device)
    return build_diffusion_loop(recipe, world, StopFlag(), model, data, RunStart(), None, held), data.samples


def run_bare_step(job: Any, samples: Sequence[Any]) -> None:
    """Run the same step in plain torch: read, encode, add noise, predict, compute the loss, and DeepSpeed's backward
    and step."""
    import torch

    from wfm_ds.chunks import split_into_chunks
    from wfm_ds.data.media import load_media
    from wfm_ds.data.pixels import Framing, draw_centre

    size = Framing(height=job.recipe.sampling.height, width=job.recipe.sampling.width, max_upscale=8.0)
    drawn = random.sample(samples, job.run_sizes.samples_per_step)
    ds, micros = job.engine.ds, list(split_into_chunks(drawn, job.recipe.engine.micro_batch_size))
    for i, micro in enumerate(micros):
        pixels = [load_media(sample.media, size, draw_centre) for sample in micro]
        clean = job.model.encode_uint8(pixels)
        sigma_B = torch.rand(len(clean))
        share = sigma_B.view(-1, 1, 1, 1)
        noise = torch.randn_like(clean)
        texts = job.text_cache.encode([sample.prompt.text for sample in micro])
        velocity = job.model.denoise((1 - share) * clean + share * noise, sigma_B, texts, 0)
        ds.set_gradient_accumulation_boundary(i + 1 == len(micros))
        ds.backward((velocity - (noise - clean)).square().mean())
        ds.step()


def wait_until_idle() -> float:
    """Wait until all other threads of this process sleep. Return the processor seconds of all threads.

    The state comes from the kernel: on a busy machine a thread with work may get no processor time and only appear
    idle.
    """
    this = str(threading.get_native_id())
    while any(_thread_state(task) != "S" for task in Path("/proc/self/task").iterdir() if task.name != this):
        time.sleep(0.001)
    return time.process_time()


def _thread_state(task: Path) -> str:
    """Return the state of a thread, in the format of proc(5). The thread name before it is in brackets and may contain
    spaces."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has exited
        return "S"


def time_in_pairs(
    ours: Callable[[], object], bare: Callable[[], object], pairs: int
) -> tuple[list[float], list[float]]:
    """Return the processor seconds of one call of each, in alternating blocks. Garbage is collected between blocks."""
    seconds: dict[Callable[[], object], list[float]] = {ours: [], bare: []}

    def time_calls(work: Callable[[], object], calls: int) -> float:
        began = wait_until_idle()
        for _ in range(calls):
            work()
        return (wait_until_idle() - began) / calls

    for work in (ours, bare):
        time_calls(work, WARM_UP)
    calls = max(1, round(BLOCK_S / time_calls(bare, WARM_UP)))
    for pair in range(pairs):
        for work in (ours, bare) if pair % 2 == 0 else (bare, ours):
            gc.collect()
            seconds[work].append(time_calls(work, calls))
    return seconds[ours], seconds[bare]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest symmetric interval of order statistics that contains the median with at least 95 %
    probability.

    The values must be independent; no other assumption is made. Raises ValueError for fewer than 6 values.
    """
    n, ordered = len(values), sorted(values)
    if n < 6:
        raise ValueError(f"{n} pairs; a 95 % interval needs at least 6")
    outside, k = 0.0, 0  # probability that the median is outside the k-th smallest and k-th largest value
    while (outside := outside + 2 * math.comb(n, k) / 2**n) <= 0.05:
        k += 1
    return ordered[k - 1], ordered[n - k]


def measure_case(name: str, pairs: int) -> dict[str, Any]:
    import torch

    from wfm_ds.demos.digits_data import write_digits

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    case, goal = CASES[name]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        folder = Path(temporary)
        write_digits(folder / "digits")
        loop, samples = open_loop(folder, case, held)
        loop.start()
        ours, bare = time_in_pairs(loop.run_step, lambda: run_bare_step(loop.job, samples), pairs)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    low, high = median_interval(ratios)
    row = {"step": name, "bare ms": 1e3 * statistics.median(bare), "ours ms": 1e3 * statistics.median(ours)}
    return row | {"ratio": statistics.median(ratios), "from": low, "to": high, "pairs": pairs, "goal": goal}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks, at least 6")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results/")
    args = parser.parse_args(argv)
    rows = [measure_case(name, args.pairs) for name in CASES]
    report.print_results("overhead", rows, write=args.write)
    return int(any(row["ratio"] > row["goal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
