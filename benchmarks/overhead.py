"""Processor time of an SFT step beside a bare loop's: `python -m benchmarks.overhead [--steps 60] [--write]`.

Both loops train one model with one DeepSpeed engine on the same images, in turns and in one process: ours as a run does
it (order of the data, keyed noise, metrics, checkpoints that are not due), the bare one as a page of plain torch does.
One rank on a CPU. They take turns block by block: what a loop's threads read ahead falls into its own block but for the
edges. The ratio is of the medians of all blocks but the first.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny" / "sd3_sft.yaml"
BLOCK = 10  # steps
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
    from wfm_ds.run.folder import Start
    from wfm_ds.run.model import load_model
    from wfm_ds.training.build import build_loop
    from wfm_ds.training.preflight import preflight

    places = [f"run.output_dir={folder / 'run'}", f"data.path={folder / 'digits' / 'images'}", "run.steps=100000"]
    recipe = recipe_file.load(RECIPE, [*places, *COMMON, *case])
    world = World.join()
    data, model = preflight(recipe, world.size), load_model(recipe, world.device)
    return build_loop(recipe, world, StopFlag(), model, data, Start(), None, held), data.samples


def bare_step(job: Any, samples: Sequence[Any]) -> None:
    """The same step in plain torch: read, encode, noise, predict, compare, and DeepSpeed's backward and step."""
    import torch

    from wfm_ds.chunks import chunks
    from wfm_ds.data.media import load_media
    from wfm_ds.data.pixels import Framing, centre

    size = Framing(height=job.recipe.sampling.height, width=job.recipe.sampling.width, max_upscale=8.0)
    drawn = random.sample(samples, job.derived.samples_per_step)
    ds, micros = job.engine.ds, list(chunks(drawn, job.recipe.engine.micro_batch_size))
    for i, micro in enumerate(micros):
        pixels = [load_media(sample.media, size, centre) for sample in micro]
        clean = job.model.encode_media(pixels)
        sigma_B = torch.rand(len(clean))
        share = sigma_B.view(-1, 1, 1, 1)
        noise = torch.randn_like(clean)
        texts = job.texts.encode([sample.prompt.text for sample in micro])
        velocity = job.model.denoise((1 - share) * clean + share * noise, sigma_B, texts, 0)
        ds.set_gradient_accumulation_boundary(i + 1 == len(micros))
        ds.backward((velocity - (noise - clean)).square().mean())
        ds.step()


def measured(name: str, steps: int) -> dict[str, Any]:
    case, goal = CASES[name]
    from wfm_ds.data.digits import write_digits

    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as held:
        folder = Path(temporary)
        write_digits(folder / "digits")
        loop, samples = loop_of(folder, case, held)
        loop.begin()
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}

        def timed(who: str, work: Callable[[], object]) -> None:
            began = time.process_time()
            for _ in range(BLOCK):
                work()
            seconds[who].append((time.process_time() - began) / BLOCK)

        for _ in range(1 + steps // BLOCK):
            timed("ours", loop.advance)
            timed("bare", lambda: bare_step(loop.job, samples))
    ours, bare = (statistics.median(seconds[who][1:]) for who in ("ours", "bare"))
    return {"step": name, "bare ms": 1e3 * bare, "ours ms": 1e3 * ours, "ratio": ours / bare, "goal": goal}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each loop")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/")
    args = parser.parse_args(argv)
    rows = [measured(name, args.steps) for name in CASES]
    sys.stdout.write(report.table(rows) + "\n")
    if args.write:
        report.write("overhead", report.machine(), rows)
    return int(any(row["ratio"] > row["goal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
