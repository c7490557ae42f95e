"""Weight files of a fully trained denoiser that several ranks write at the same time, for the rollout workers.

The files need not survive a crash of the machine, so they are not flushed to disk.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.tensor_file import StoredTensorSpec, TensorFile
from wfm_ds.export.weights import (
    ShardedSource,
    TensorPlace,
    create_part_folder,
    exhaust_stream,
    file_dtype,
    name_shards,
    require_complete,
    require_expected,
    require_finite,
)

MAX_WAITING = 2  # gathered tensors that wait for the disk, per rank


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of one denoiser component, and the rank that writes it."""

    part: str
    name: str
    rank: int
    specs: Mapping[str, StoredTensorSpec]  # {name of the tensor in the file: spec}


def plan_weight_files(target: ExportTarget, dtype: torch.dtype, ranks: Sequence[int]) -> list[WeightFile]:
    """Distribute the trained tensors over one file per component and rank in `ranks`, with about equal sizes.

    Consecutive tensors belong to different ranks, so that all ranks write while the tensors are gathered one by one.
    """
    files, load = [], dict.fromkeys(ranks, 0)
    for part in target.parts:
        shards: dict[int, dict[str, StoredTensorSpec]] = {}
        for name, spec in target.tensor_specs(part).items():
            if not target.is_frozen(name):
                rank = min(ranks, key=lambda rank: load[rank])
                shards.setdefault(rank, {})[name] = stored = StoredTensorSpec(file_dtype(spec.dtype, dtype), spec.shape)
                load[rank] += stored.nbytes
        owners = sorted(shards)
        names = name_shards([shards[rank] for rank in owners])
        files += [WeightFile(part, name, rank, shards[rank]) for name, rank in zip(names, owners, strict=True)]
    return files


def create_part_folders(target: ExportTarget, files: Sequence[WeightFile], folder: Path) -> None:
    """Create `folder` with the configs and indexes of the denoiser components. Raises UserError."""
    try:
        for part in target.parts:
            specs_by_file = {f.name: f.specs for f in files if f.part == part}
            create_part_folder(folder / part, target.read_config(part), specs_by_file)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}): free space or fix the folder") from error


def write_weight_files(
    target: ExportTarget,
    source: ShardedSource,
    files: Sequence[WeightFile],
    folder: Path,
    *,
    policy: str,
    dtype: torch.dtype,
    rank: int,
) -> list[Path]:
    """Write the files of this rank, and return their paths. All ranks must call this with the same plan `files`.

    A thread writes while the next tensors are gathered. Raises UserError if the tensors do not match the target or are
    not finite, or if a file cannot be written.
    """
    owners = {target.tensor_prefix(f.part) + name: f.rank for f in files for name in f.specs}
    stream = source.iter_full_tensors(policy, dtype=dtype, owners=owners)
    own_files = [f for f in files if f.rank == rank]
    try:
        with contextlib.ExitStack() as stack:
            missing: dict[str, TensorPlace] = {}
            for f in own_files:
                file = TensorFile(folder / f.part / f.name, f.specs, {"format": "pt"}, sync=False)
                prefix, out = target.tensor_prefix(f.part), stack.enter_context(file)
                missing |= {prefix + name: TensorPlace(out, name, spec) for name, spec in f.specs.items()}
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="publish"))
            writes: deque[Future[None]] = deque()
            for name, tensor in stream:
                if tensor is not None:
                    require_expected(name, missing)
                    writes.append(pool.submit(_write_tensor, name, tensor, missing.pop(name)))
                del tensor  # free it before the next one is gathered
                while len(writes) > MAX_WAITING:
                    writes.popleft().result()
            for write in writes:
                write.result()
            require_complete(missing)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: the weights could not be written ({error}); free space or fix the folder"
        ) from error
    finally:
        exhaust_stream(stream)
    return [folder / f.part / f.name for f in own_files]


def _write_tensor(name: str, tensor: Tensor, place: TensorPlace) -> None:
    require_finite(name, tensor)
    place.write(tensor)
