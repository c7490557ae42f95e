"""This rank's position in the process group, and collectives for small values, which use gloo on the CPU.

A replica is a group of `sp_size` consecutive ranks that process the same samples. Each of them processes a shard of the
tokens. The first rank is the leader. dp_rank is the index of a replica, and dp_size is the number of replicas.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from wfm_ds.distributed.accelerator import find_free_port, threads_per_rank, uses_cuda
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.ranks import LOOPBACK, LaunchedRank, find_launched_rank
from wfm_ds.errors import RunError, UserError

COLLECTIVE_TIMEOUT_S = 1800.0
WAIT_INTERVAL_S = 10.0  # time between two polls of the ranks in run_without_timeout


@dataclass(frozen=True, slots=True)
class Replica:
    """The process groups of a replica with several ranks."""

    size: int
    group: ProcessGroup  # the replica's ranks, for collectives of the denoiser on the device
    host_group: ProcessGroup  # the same ranks over gloo
    leaders: ProcessGroup  # the first rank of each replica, over gloo


@dataclass(frozen=True, slots=True)
class World:
    """The process group as seen by this rank. host_group: gloo group that exchanges flags, counts and texts."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: ProcessGroup | None  # None selects the default group
    timeout_s: float = COLLECTIVE_TIMEOUT_S  # per collective
    replica: Replica | None = None  # None: each rank is a replica

    @classmethod
    def single_process(cls) -> World:
        """Return a World of one rank on the CPU, for work without a process group."""
        return cls(0, 1, 0, torch.device("cpu"), None)

    @classmethod
    def join(cls, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
        """Join the launcher's process group, or create one of size 1. All ranks must call this, once per run.

        Sets the environment variables that torch and DeepSpeed read. Raises UserError on rank 0 if the rendezvous port
        is in use, and on all ranks of a node that has fewer GPUs than ranks.
        """
        import deepspeed

        launched = find_launched_rank(os.environ)
        if launched is None:
            launched = LaunchedRank(0, 1, 0, 1, LOOPBACK, find_free_port(), launcher="python")
        os.environ.update(launched.variables())
        timeout = datetime.timedelta(seconds=timeout_s)
        local_rank = launched.local_rank
        if uses_cuda():
            require_gpus(launched, torch.cuda.device_count())
            torch.cuda.set_device(local_rank)
            device = torch.device("cuda", local_rank)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(threads_per_rank())
            # Prevents DeepSpeed from compiling its shared-memory all-reduce, which needs a compiler. Gloo is used.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            settings = {"dist_backend": backend, "auto_mpi_discovery": False, "verbose": False}
            try:
                deepspeed.init_distributed(**settings, timeout=timeout)
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                raise UserError(
                    f"port {launched.master_port} is in use on this machine: choose another one with "
                    "--master_port of deepspeed or torchrun, or MASTER_PORT"
                ) from error
        host_group = None if device.type == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, device, host_group, timeout_s)

    def with_replicas(self, sp_size: int) -> World:
        """Return this World with replicas of `sp_size` consecutive ranks. All ranks must call this.

        Raises UserError if `sp_size` does not divide the number of ranks.
        """
        if sp_size == 1:
            return replace(self, replica=None)
        timeout = datetime.timedelta(seconds=self.timeout_s)
        group = create_sequence_group(sp_size, timeout)
        host_group = group if self.device.type == "cpu" else create_sequence_group(sp_size, timeout, backend="gloo")
        leaders = dist.new_group(list(range(0, self.size, sp_size)), backend="gloo", timeout=timeout)
        return replace(self, replica=Replica(sp_size, group, host_group, leaders))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sp_size(self) -> int:
        return 1 if self.replica is None else self.replica.size

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sp_size

    @property
    def dp_size(self) -> int:
        return self.size // self.sp_size

    @property
    def is_leader(self) -> bool:
        """Whether this rank does the work that only one rank of a replica must do: reading data, decoding, rewards."""
        return self.sp_rank == 0

    def _all_reduce(self, values: Mapping[str, float], op: Any) -> dict[str, float]:
        if self.size == 1 or not values:  # all ranks pass the same names, so all of them return here
            return {name: float(value) for name, value in values.items()}
        LIVENESS.start_operation(f"a reduction of {', '.join(values)}"[:80])
        numbers = torch.tensor([float(v) for v in values.values()], dtype=torch.float64)
        dist.all_reduce(numbers, op=op, group=self.host_group)
        return dict(zip(values, numbers.tolist(), strict=True))

    def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over all ranks, in float64. All ranks must call this with the same names in the same order."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def sum_over_replicas(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over the replica leaders. All ranks must call this with the same names in the same order."""
        return self.sum_over_ranks(values if self.is_leader else dict.fromkeys(values, 0.0))

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return each value's maximum over all ranks. All ranks must call this with equal names in equal order."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is True on at least one rank. All ranks must call this."""
        return self.max_over_ranks({"flag": float(flag)})["flag"] > 0

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. All ranks must call this."""
        if self.size == 1:
            return _decode_json(_encode_json(value))
        LIVENESS.start_operation("a broadcast of rank 0's value")
        return _broadcast_json(0, self.host_group, value if self.is_main else None, is_source=self.is_main)

    def broadcast_in_replica(self, value: Any) -> Any:
        """Return the JSON value of the replica's leader. All ranks of the replica must call this."""
        if self.replica is None:
            return value
        LIVENESS.record_progress("a broadcast in a replica")  # the number of calls differs between ranks
        return _broadcast_json(self.rank - self.sp_rank, self.replica.host_group, value, is_source=self.is_leader)

    def broadcast_tensor_in_replica(self, tensor: Tensor | None) -> Tensor:
        """Return the leader's tensor on each rank's device. All ranks of a replica must call this.

        tensor: None on ranks other than the leader.
        """
        if self.replica is None:
            assert tensor is not None
            return tensor
        header = None if tensor is None else (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        shape, dtype = self.broadcast_in_replica(header)
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        tensor = tensor.to(self.device).contiguous()
        dist.broadcast(tensor, src=self.rank - self.sp_rank, group=self.replica.group)
        return tensor

    def transfer_tensor(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """Send a tensor from replica `source` to replica `target` through the CPU, and return it.

        Only the ranks of these two replicas call this, in the same order for several transfers. Ranks of `source` pass
        the tensor to send, and ranks of `target` pass any tensor of the same shape and dtype.
        """
        LIVENESS.record_progress("a tensor transfer between replicas")
        if self.dp_rank == source:
            target_rank = target * self.sp_size + self.sp_rank
            dist.send(tensor.detach().cpu().contiguous(), dst=target_rank, group=self.host_group)
            return tensor
        received = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        dist.recv(received, src=source * self.sp_size + self.sp_rank, group=self.host_group)
        return received.to(tensor.device)

    def gather_replica_rows(self, rows: npt.NDArray[np.uint8], counts: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Concatenate the uint8 rows of a replica's ranks on its leader. The other ranks get an empty array.

        All ranks of the replica must call this, with rows of the same shape. counts: number of rows of each rank. No
        rank may have more rows than the leader.
        """
        if self.replica is None:
            return rows
        LIVENESS.record_progress("a gather of rows in a replica")
        group, first = self.replica.host_group, self.rank - self.sp_rank
        if not self.is_leader:
            if len(rows):
                dist.send(torch.from_numpy(rows), dst=first, group=group)
            return np.empty(0, np.uint8)
        all_rows = np.empty((sum(counts), *rows.shape[1:]), np.uint8)
        all_rows[: len(rows)] = rows
        start = len(rows)
        for rank, count in enumerate(counts[1:], start=1):
            if count:
                dist.recv(torch.from_numpy(all_rows[start : start + count]), src=first + rank, group=group)
            start += count
        return all_rows

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order, on every rank. All ranks must call this."""
        blob = _encode_json(value)
        if self.size == 1:
            return [_decode_json(blob)]
        LIVENESS.start_operation("a gather of values")
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(blob)]), group=self.host_group)
        longest = max(int(n) for n in lengths)
        all_blobs = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_blobs, torch.nn.functional.pad(blob, (0, longest - len(blob))), group=self.host_group)
        return [_decode_json(b[: int(n)]) for b, n in zip(all_blobs, lengths, strict=True)]

    def gather_from_leaders(self, value: Any) -> list[Any]:
        """Return the JSON values of all replica leaders, in replica order, on every rank. All ranks must call this."""
        return self.gather(value if self.is_leader else None)[:: self.sp_size]

    def gather_leader_arrays(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the arrays of all replica leaders on rank 0, [] on others. Only leaders call it, with equal shapes."""
        if self.dp_size == 1:
            return [array.copy()]
        local_array = torch.from_numpy(array.copy())
        arrays = [torch.empty_like(local_array) for _ in range(self.dp_size)] if self.is_main else []
        group = self.host_group if self.replica is None else self.replica.leaders
        dist.gather(local_array, arrays or None, dst=0, group=group)
        return [a.numpy() for a in arrays]

    def run_without_timeout(self, work: Callable[[], Any], *, runs_here: bool | None = None) -> Any:
        """Run `work` on some ranks while the others wait without a time limit. All ranks must call this.

        runs_here: whether this rank runs `work`; by default, only rank 0 does. Returns the result of `work`, or None on
        other ranks. If `work` raises UserError on any rank, all ranks raise this error.
        """
        is_runner = self.is_main if runs_here is None else runs_here
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work) if is_runner else None
            while self.any_rank(future is not None and not futures.wait([future], WAIT_INTERVAL_S).done):
                pass
            return self.run_checked(future.result if future is not None else lambda: None)

    def barrier(self) -> None:
        if self.size == 1:
            return
        LIVENESS.start_operation("a barrier")
        dist.barrier(group=self.host_group)

    def run_checked(self, work: Callable[[], Any], on: Literal["all", "leaders", "main"] = "all") -> Any:
        """Run `work` on all ranks (`all`), on the replica leaders (`leaders`) or on rank 0 (`main`).

        All ranks must call this. Returns the result of `work`, or None on other ranks. If `work` raises UserError or
        RunError on any rank, all ranks raise this error.
        """
        result, error = None, None
        if {"all": True, "leaders": self.is_leader, "main": self.is_main}[on]:
            try:
                result = work()
            except (UserError, RunError) as local_error:
                error = local_error
        if self.any_rank(error is not None):
            outcomes = self.gather(None if error is None else [isinstance(error, RunError), str(error)])
            is_run_error, message = next(outcome for outcome in outcomes if outcome is not None)
            common_error = RunError(message) if is_run_error else UserError(message)
            common_error.agreed = True
            raise common_error from error
        return result


def require_gpus(launched: LaunchedRank, num_gpus: int) -> None:
    if num_gpus < launched.local_size:
        raise UserError(
            f"rank {launched.rank} sees {num_gpus} GPUs, but its node has {launched.local_size} ranks: start one rank "
            "per GPU, and let each rank see all GPUs of its node (srun --gpus-per-node, not --gpus-per-task)"
        )


def _encode_json(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json(blob: Tensor) -> Any:
    """Undo `_encode_json`, but tuples become lists, and keys become strings."""
    return json.loads(blob.numpy().tobytes())


def _broadcast_json(source: int, group: ProcessGroup | None, value: Any, *, is_source: bool) -> Any:
    """Return the JSON value of rank `source` on every rank of the group. All ranks of the group must call this."""
    blob = _encode_json(value) if is_source else torch.empty(0)
    length = torch.tensor([len(blob)])
    dist.broadcast(length, src=source, group=group)
    if not is_source:
        blob = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(blob, src=source, group=group)
    return _decode_json(blob)


def create_sequence_group(
    num_ranks: int, timeout: datetime.timedelta | None = None, backend: str | None = None
) -> ProcessGroup:
    """Create the sequence-parallel groups of `num_ranks` consecutive ranks and return this rank's group.

    All ranks must call this. timeout: time limit of the group's collectives, by default that of torch. backend: by
    default that of the default group. Raises UserError if num_ranks does not divide the total number of ranks.
    """
    world_size = dist.get_world_size()
    if num_ranks < 1 or world_size % num_ranks:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise UserError(
            f"engine.sequence_parallel = {num_ranks} does not divide the {world_size} ranks; use one of "
            f"{', '.join(map(str, divisors))}"
        )
    group: ProcessGroup = dist.new_subgroups(group_size=num_ranks, timeout=timeout, backend=backend)[0]  # type: ignore[no-untyped-call]
    return group
