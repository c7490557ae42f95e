"""Memory for loading a denoiser and passing it to DeepSpeed: `python -m benchmarks.loading [--layers 4]`.

Two ranks on a CPU load a random SD3 transformer stored in float32 and build the engine for training in bfloat16. Each
measures its peak private memory from after the imports to the first forward pass:

    whole     as in diffusers and DeepSpeed: each rank loads the network in its final dtype, then deepspeed.initialize
    mapped    ours: pages of the file, from which each rank copies its part (wfm_ds/engine/weight_placement.py)

All processes of a machine share the pages of a mapped file, and the system can drop them at any time, so they are
reported separately. If the predictions differ, the exit code is 1 and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.export import num_parameters, write_base, write_small_buckets
from benchmarks.processes import run_ranks

PROGRAM = "benchmarks.loading"  # not __name__, which is "__main__" in a subprocess
RANKS = 2
MIB = 2**20
SAMPLE_S = 0.005
WAYS = ("whole", "mapped")
CASES = [("zero3", "LoRA"), ("zero3", "full"), ("zero2", "LoRA")]


class Peak:
    """The largest resident memory of this process while a block runs, sampled; in MiB above its start."""

    def __init__(self) -> None:
        self.own_mib = self.file_mib = 0.0

    @contextmanager
    def track(self) -> Iterator[None]:
        before, ended = resident_mib(), threading.Event()

        def sample_until_end() -> None:
            while not ended.wait(SAMPLE_S):
                own, file = (now - then for now, then in zip(resident_mib(), before, strict=True))
                self.own_mib, self.file_mib = max(self.own_mib, own), max(self.file_mib, file)

        thread = threading.Thread(target=sample_until_end, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def resident_mib() -> tuple[float, float]:
    """Return the private memory of this process, and the pages of files that it has mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, file = (int(lines[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile"))
    return own, file


def measure_rank(folder: Path, way: str, zero: str, what: str) -> dict[str, Any]:
    """Return the peak memory and a prediction of one rank."""
    import torch
    from diffusers import SD3Transformer2DModel

    from wfm_ds.distributed.world import World
    from wfm_ds.engine import preparation
    from wfm_ds.engine.engine import DenoiserEngine
    from wfm_ds.models.assets.loading import load_network
    from wfm_ds.recipe.schema import Recipe

    world, peak = World.join(), Peak()
    recipe = Recipe.model_validate(
        {
            "run": {"output_dir": str(folder), "steps": 1},
            "model": {"path": str(folder / "base"), "dtype": "bfloat16"},
            "engine": {"deepspeed": str(folder / f"{zero}.json")},
            "lora": {"rank": 16, "alpha": 16} if what == "LoRA" else None,
            "data": {"kind": "paired", "path": "unused"},
            "sampling": {"height": 64, "width": 64},
            "algorithm": {"name": "sft"},
        }
    )
    if way == "whole":
        vars(preparation)["place_weights"] = lambda *_: None  # DeepSpeed receives the network as loaded by diffusers
    with peak.track():
        denoiser = load_network(
            folder / "base" / "transformer", SD3Transformer2DModel, torch.bfloat16, mapped=way == "mapped"
        )
        engine = DenoiserEngine.build(
            denoiser,
            recipe,
            world,
            lora_targets=("to_q", "to_k", "to_v"),
            policies=frozenset(),
            accumulation=1,
            total_updates=1,
        )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        velocity = engine.forward_module(
            hidden_states=torch.randn(1, 16, 8, 8, generator=draw).bfloat16(),
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=torch.randn(1, 4, 4096, generator=draw).bfloat16(),
            pooled_projections=torch.randn(1, 2048, generator=draw).bfloat16(),
            return_dict=False,
        )[0]
    return {"own MiB": peak.own_mib, "file MiB": peak.file_mib, "velocity": velocity.float().flatten().tolist()}


def compare_ways(folder: Path, parameters: int, zero: str, what: str) -> list[dict[str, Any]]:
    """Return a row for each way. Raises SystemExit if the predictions differ."""
    found = {way: run_ranks(PROGRAM, [way, zero, what], RANKS, folder) for way in WAYS}
    velocities = [rank["velocity"] for ranks in found.values() for rank in ranks]
    if any(velocity != velocities[0] for velocity in velocities):
        raise SystemExit("the predictions differ; no result is written")
    return [
        {
            "ZeRO": zero,
            "training": what,
            "way": way,
            "parameters": parameters,
            "weights in bfloat16, MiB": round(2 * parameters / MIB),
            "peak of rank 0, MiB": round(ranks[0]["own MiB"]),
            "peak of rank 1, MiB": round(ranks[1]["own MiB"]),
            "mapped pages, shared, MiB": round(max(rank["file MiB"] for rank in ranks)),
        }
        for way, ranks in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.loading", description="Measure the memory of loading.")
    parser.add_argument("--layers", type=int, default=4, help="4 (default): a third of a billion parameters")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--rank", nargs=4, metavar=("FILE", "WAY", "ZERO", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        file = Path(options.rank[0])
        file.write_text(json.dumps(measure_rank(file.parent, *options.rank[1:])))
        return 0
    with tempfile.TemporaryDirectory(prefix="wfm-loading-") as name:
        folder = Path(name)
        write_base(folder / "base", options.layers)
        parameters = num_parameters(options.layers)
        for stage in (2, 3):
            write_small_buckets(folder / f"zero{stage}.json", stage)
        rows = [row for case in CASES for row in compare_ways(folder, parameters, *case)]
    sys.stdout.write(report.format_table(rows) + "\n")
    if not options.no_write:
        report.write_results("loading", report.describe_machine(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
