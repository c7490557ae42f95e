"""Activation memory of one rank, by the number of ranks that share its tokens: `python -m benchmarks.activations
[--frames 15]`.

Real processes on a CPU (gloo) run a small Wan transformer forward and backward on one video. All weights are trained.
The outputs of every operator, including communication buffers, are tracked while they are alive. Bytes are counts, so
they do not depend on the load of the machine. Reported for the rank with the most bytes:

    kept   alive after the forward pass: saved for the backward pass, and the output
    peak   the largest sum at any moment of both passes, including gradients of activations

Weights, their gradients and the inputs are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from wfm_ds.distributed.world import find_free_port
from wfm_ds.engine.live_bytes import LiveByteCounter

SIDE = 32  # rows and columns of a latent frame; patches are 2 x 2
WIDER = {"num_attention_heads": 8, "ffn_dim": 512, "num_layers": 4}  # wider than the tiny pipeline, for up to 8 ranks
CHECKPOINTING = {"off": False, "on": True}
MIB = 2**20


def measure_live_bytes(num_ranks: int, frames: int, *, checkpointing: bool) -> dict[str, int]:
    """Return the live bytes of one forward and backward pass. Runs on each rank; the ranks share the tokens."""
    from diffusers import WanTransformer3DModel

    from wfm_ds.distributed.world import World
    from wfm_ds.models.tiny.wan21 import TRANSFORMER
    from wfm_ds.ulysses.install import install_ulysses

    world = World.join().with_replicas(num_ranks)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(**{**TRANSFORMER, **WIDER})
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if world.replica is not None:
        install_ulysses(transformer, world.replica.group)
    for parameter in transformer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = {
        "hidden_states": torch.randn(1, 4, frames, SIDE, SIDE),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 16, 32),
    }
    with LiveByteCounter() as live:
        output = transformer(**inputs, return_dict=False)[0]
        kept = live.current
        output.backward(torch.ones_like(output))
    most = world.max_over_ranks({"kept": float(kept), "peak": float(live.peak)})
    return {name: int(value) for name, value in most.items()}


def run_rank(num_ranks: int, frames: int, out: Path) -> None:
    found = {name: measure_live_bytes(num_ranks, frames, checkpointing=on) for name, on in CHECKPOINTING.items()}
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(found))


def measure_ranks(num_ranks: int, frames: int) -> dict[str, dict[str, int]]:
    """Start the ranks, wait for all of them, and return their results for each checkpointing setting."""
    with tempfile.TemporaryDirectory(prefix="wfm-activations-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.activations", "--role", "rank", "--ranks", str(num_ranks)]
        command += ["--frames", str(frames), "--out", str(out)]
        everyone = {"WORLD_SIZE": str(num_ranks), "LOCAL_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        everyone |= {"MASTER_PORT": str(find_free_port()), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        processes = [
            subprocess.Popen(command, env={**os.environ, **everyone, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=2)
            for r in range(num_ranks)
        ]
        if any([process.wait() for process in processes]):  # a list: waits for all ranks, also after a failure
            raise SystemExit("a rank failed")
        found: dict[str, dict[str, int]] = json.loads(out.read_text())
        return found


def measure_rows(ranks: Sequence[int], frames: int) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, with and without gradient checkpointing, relative to the first number."""
    found = {num_ranks: measure_ranks(num_ranks, frames) for num_ranks in ranks}
    rows: list[dict[str, Any]] = []
    for checkpointing in CHECKPOINTING:
        for num_ranks in ranks:
            row: dict[str, Any] = {
                "checkpointing": checkpointing,
                "tokens": frames * (SIDE // 2) ** 2,
                "ranks of a replica": num_ranks,
            }
            for name, size in found[num_ranks][checkpointing].items():
                whole = found[ranks[0]][checkpointing][name]
                row |= {f"{name} MiB": size / MIB, f"{name}, relative": size / whole}
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.activations", description="Count activation bytes of a rank.")
    parser.add_argument("--frames", type=int, default=15, help="latent frames, 256 tokens each (default 15)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks of a replica (default 1 2 4)")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--role", choices=["rank"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.role:
        run_rank(options.ranks[0], options.frames, options.out)
        return 0
    rows = measure_rows(options.ranks, options.frames)
    sys.stdout.write(report.format_table(rows) + "\n")
    if not options.no_write:
        report.write_results("activations", report.describe_machine(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
