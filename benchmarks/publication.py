"""CPU seconds to publish a fully trained model to rollout workers: `python -m benchmarks.publication [--gib 1]`.

Publishes random weights of 1 GiB in bfloat16 from one process, in three ways in turn. `before`: float32 tensors are
checked with isfinite, rounded, written, flushed to disk and hashed with SHA-256. `float32 tensors` and `bfloat16
tensors`: `write_weight_files`, which receives tensors of this dtype; ranks with a GPU round on the GPU and deliver
bfloat16. Then hashes the files with several functions, as a worker does before it loads them.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import print_results, summarize
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.tensor_file import StoredTensorSpec, TensorFile
from wfm_ds.export.weight_files import create_part_folders, plan_weight_files, write_weight_files
from wfm_ds.program import run_command
from wfm_ds.rollout.remote.publisher import describe_files, hash_file

PART, SHAPE = "transformer", torch.Size([2048, 4096])
DTYPE = torch.bfloat16


class RandomTarget(ExportTarget):
    """A denoiser of `count` linear layers that has no folder."""

    count = 0

    def read_config(self, part: str) -> dict[str, Any]:
        return {}

    def tensor_specs(self, part: str) -> dict[str, StoredTensorSpec]:
        return {f"blocks.{i}.weight": StoredTensorSpec(torch.float32, SHAPE) for i in range(self.count)}


class RandomSource:
    """Random weights, gathered in advance."""

    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tensors = {name: (0.02 * torch.randn(SHAPE, generator=draw)).to(dtype) for name in names}

    def iter_full_tensors(
        self, policy: str, *, dtype: torch.dtype, owners: Mapping[str, int]
    ) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.to(dtype)


def publish_as_before(source: RandomSource, target: RandomTarget, folder: Path) -> None:
    specs = {name: StoredTensorSpec(DTYPE, spec.shape) for name, spec in target.tensor_specs(PART).items()}
    path = folder / PART / "weights.safetensors"
    path.parent.mkdir(parents=True)
    with TensorFile(path, specs, {"format": "pt"}) as file:
        for name, tensor in source.tensors.items():
            assert bool(torch.isfinite(tensor).all())
            file.write(name, tensor.to(DTYPE))
    hash_with("sha256", path)


def publish_now(source: RandomSource, target: RandomTarget, folder: Path) -> None:
    plan = plan_weight_files(target, DTYPE, [0])
    create_part_folders(target, plan, folder)
    describe_files(folder, write_weight_files(target, source, plan, folder, policy="old", dtype=DTYPE, rank=0))


def hash_with(name: str, path: Path) -> None:
    with path.open("rb") as file:
        hashlib.file_digest(file, name)


def checksum(path: Path) -> None:
    value, buffer = 0, memoryview(bytearray(1 << 18))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            value = zlib.crc32(buffer[:size], value)


def measure(work: Callable[[], Any]) -> tuple[float, float]:
    """Return (CPU seconds, seconds)."""
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - start_cpu, time.perf_counter() - start


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    target = RandomTarget(Path(), (PART,))
    RandomTarget.count = round(args.gib * 2**30 / DTYPE.itemsize / SHAPE.numel())
    names = list(target.tensor_specs(PART))
    single, half = RandomSource(names, torch.float32), RandomSource(names, DTYPE)
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        folder = Path(root) / "policy"
        publications: dict[str, Callable[[], None]] = {
            "before": lambda: publish_as_before(single, target, folder),
            "float32 tensors": lambda: publish_now(single, target, folder),
            "bfloat16 tensors": lambda: publish_now(half, target, folder),
        }
        path = Path(root) / "file"
        costs: dict[str, list[tuple[float, float]]] = {}
        hashes: dict[str, Callable[[], Any]] = {
            "hash, sha256": lambda: hash_with("sha256", path),
            "hash, crc32": lambda: checksum(path),
            "hash, xxh3_128": lambda: hash_file(path),
        }
        for _ in range(args.rounds):
            for name, publish in publications.items():
                costs.setdefault(name, []).append(measure(publish))
                (file,) = folder.rglob("*.safetensors")
                file.replace(path)
                shutil.rmtree(folder)
            for name, work in hashes.items():
                costs.setdefault(name, []).append(measure(work))
    rows = [
        {"work": name, "CPU seconds": summarize(cpu for cpu, _ in cost), "seconds": summarize(wall for _, wall in cost)}
        for name, cost in costs.items()
    ]
    print_results("publication", rows, write=args.write, GiB=args.gib)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--gib", type=float, default=1.0, help="size of the model in bfloat16")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--folder", type=Path, help="folder for the files (default: the folder for temporary files)")
    p.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    return run_command(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
