"""Processor time of an SFT step beside a bare loop's: `python -m benchmarks.overhead [--pairs 30] [--write]`.

Both loops train one model with one DeepSpeed engine on the same images in one process: ours as a run does it (order of
the data, keyed noise, metrics, checkpoints that are not due), the bare one as a page of plain torch does. One rank on
one core: where ours reads ahead on a second one, both cores get slower, and the same work takes more processor time.
They take turns in short blocks, ours first in every other pair, so that a machine that gets slower does so for both;
before the clock stops, what a block's threads read ahead is there. The ratio is the median over the pairs, and the
interval holds the true median with 95 %.
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

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny" / "sd3_sft.yaml"
BLOCK_S = 0.3  # of processor time, about: what a step costs beside it wanders more slowly than this
WARM_UP = 3  # steps of each loop
CASES = {
    "tiny": ([], 1.15),
    "mid": (["sampling.height=64", "sampling.width=64", "engine.micro_batch_size=16", "data.max_upscale=8"], 1.03),
}
COMMON = [
    *("ema=null", "validation.every=0", "validation.at_start=false", "validation.holdout=0", "checkpoint.every=0"),
    *("data.caption_dropout=0", "logging.console=false", "logging.sample_every=0", "optimizer.lr=1e-5"),
]


def loop_of(folder: Path, case: Sequence[str], held: contextlib.ExitStack) -> tuple[Any, Sequence[Any]]:
    """The loop of a run with everything around it, before its first step; and its samples."""
    from wfm_ds.distributed.lifecycle import StopFlag
    from wfm_ds.distributed.world import World
    from wfm_ds.recipe import file as recipe_file
    from wfm_ds.run.model_loading import load_model
    from wfm_ds.run.output_folder import RunStart
    from wfm_ds.training.diffusion_builder import build_diffusion_loop
    from wfm_ds.training.preflight import check_and_load_data

    places = [f"run.output_dir={folder / 'run'}", f"data.path={folder / 'digits' / 'images'}", "run.steps=100000"]
    recipe = recipe_file.load_recipe(RECIPE, [*places, *COMMON, *case])
    world = World.join()
    data, model = check_and_load_data(recipe, world.size), load_model(recipe, world.device)
    return build_diffusion_loop(recipe, world, StopFlag(), model, data, RunStart(), None, held), data.samples


def bare_step(job: Any, samples: Sequence[Any]) -> None:
    """The same step in plain torch: read, encode, noise, predict, compare, and DeepSpeed's backward and step."""
    import torch

    from wfm_ds.chunks import split_into_chunks
    from wfm_ds.data.media import load_media
    from wfm_ds.data.pixels import Framing, draw_centre

    size = Framing(height=job.recipe.sampling.height, width=job.recipe.sampling.width, max_upscale=8.0)
    drawn = random.sample(samples, job.derived.samples_per_step)
    ds, micros = job.engine.ds, list(split_into_chunks(drawn, job.recipe.engine.micro_batch_size))
    for i, micro in enumerate(micros):
        pixels = [load_media(sample.media, size, draw_centre) for sample in micro]
        clean = job.model.encode_uint8(pixels)
        sigma_B = torch.rand(len(clean))
        share = sigma_B.view(-1, 1, 1, 1)
        noise = torch.randn_like(clean)
        texts = job.texts.encode([sample.prompt.text for sample in micro])
        velocity = job.model.denoise((1 - share) * clean + share * noise, sigma_B, texts, 0)
        ds.set_gradient_accumulation_boundary(i + 1 == len(micros))
        ds.backward((velocity - (noise - clean)).square().mean())
        ds.step()


def settled() -> float:
    """Wait until every other thread of this process sleeps, and return the processor seconds of all of them.

    The kernel says who sleeps: on a busy machine a thread that has work may get no time, and only looks idle.
    """
    this = str(threading.get_native_id())
    while any(_state(task) != "S" for task in Path("/proc/self/task").iterdir() if task.name != this):
        time.sleep(0.001)
    return time.process_time()


def _state(task: Path) -> str:
    """State of a thread as proc(5) has it; the name before it stands in brackets, and may hold spaces."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return "S"


def paired(ours: Callable[[], object], bare: Callable[[], object], pairs: int) -> tuple[list[float], list[float]]:
    """Processor seconds of one call of each, in blocks that stand beside each other; garbage is collected between."""
    seconds: dict[Callable[[], object], list[float]] = {ours: [], bare: []}

    def timed(work: Callable[[], object], calls: int) -> float:
        began = settled()
        for _ in range(calls):
            work()
        return (settled() - began) / calls

    for work in (ours, bare):
        timed(work, WARM_UP)
    calls = max(1, round(BLOCK_S / timed(bare, WARM_UP)))
    for pair in range(pairs):
        for work in (ours, bare) if pair % 2 == 0 else (bare, ours):
            gc.collect()
            seconds[work].append(timed(work, calls))
    return seconds[ours], seconds[bare]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Smallest interval of order statistics, the same number from each end, that holds the median with at least 95 %.

    It supposes that the values are independent and nothing else. Raises ValueError for fewer than 6: they cannot say.
    """
    n, ordered = len(values), sorted(values)
    if n < 6:
        raise ValueError(f"{n} pairs: an interval of 95 % needs at least 6")
    outside, k = 0.0, 0  # of the median, as a binomial count: below the k-th smallest or above the k-th largest
    while (outside := outside + 2 * math.comb(n, k) / 2**n) <= 0.05:
        k += 1
    return ordered[k - 1], ordered[n - k]


def measured(name: str, pairs: int) -> dict[str, Any]:
    import torch

    from wfm_ds.data.digits import write_digits

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    case, goal = CASES[name]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        folder = Path(temporary)
        write_digits(folder / "digits")
        loop, samples = loop_of(folder, case, held)
        loop.begin()
        ours, bare = paired(loop.advance, lambda: bare_step(loop.job, samples), pairs)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    low, high = median_interval(ratios)
    row = {"step": name, "bare ms": 1e3 * statistics.median(bare), "ours ms": 1e3 * statistics.median(ours)}
    return row | {"ratio": statistics.median(ratios), "from": low, "to": high, "pairs": pairs, "goal": goal}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, at least 6")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/")
    args = parser.parse_args(argv)
    rows = [measured(name, args.pairs) for name in CASES]
    sys.stdout.write(report.table(rows) + "\n")
    if args.write:
        report.write("overhead", report.machine(), rows)
    return int(any(row["ratio"] > row["goal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
