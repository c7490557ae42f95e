"""This rank's place among all, and the few collectives that are not DeepSpeed's: small values over gloo on the CPU.

A replica is the ranks that work on the same samples together, each on its share of the tokens (sequence parallelism):
`sp_size` neighbours, the first of which is its leader. Data-parallel rank and size count replicas. Work is shared out
over replicas; ZeRO's shards, files and flags are those of single ranks. Without sequence parallelism each rank is a
replica.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from wfm_ds.distributed.accelerator import uses_cuda
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

COLLECTIVE_TIMEOUT_S = 1800.0
PATIENCE_S = 10.0  # between two signs of life of a rank that the others wait for


@dataclass(frozen=True, slots=True)
class Replica:
    """The groups of a rank whose replica has more than one."""

    size: int
    group: ProcessGroup  # its ranks, on the device: the denoiser's exchanges
    host_group: ProcessGroup  # the same ranks over gloo
    leaders: ProcessGroup  # the first rank of each replica, over gloo


@dataclass(frozen=True, slots=True)
class World:
    """This process among `size`; `host_group` is a gloo group for flags, counts and texts."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: ProcessGroup | None  # None: the default group
    timeout_s: float = COLLECTIVE_TIMEOUT_S  # of a collective
    replica: Replica | None = None  # None: each rank is one

    @classmethod
    def alone(cls) -> World:
        """A world of one on the host, for work that needs no ranks."""
        import torch

        return cls(0, 1, 0, torch.device("cpu"), None)

    @classmethod
    def join(cls, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
        """Join the launcher's ranks; without it, a world of one. Every rank calls it once, before it communicates."""
        import deepspeed
        import torch
        import torch.distributed as dist

        if "RANK" not in os.environ:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(free_port())
        timeout = datetime.timedelta(seconds=timeout_s)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if uses_cuda():
            torch.cuda.set_device(local_rank)
            device = torch.device("cuda", local_rank)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(threads_per_rank())
            # DeepSpeed would compile its own all-reduce at the first start, which needs a compiler on the machine and
            # gains nothing here: gloo does.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)
        host_group = None if device.type == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, device, host_group, timeout_s)

    def in_replicas(self, sp_size: int) -> World:
        """This world with the ranks [i * sp_size, (i + 1) * sp_size) as replica i; collective. Raises UserError unless
        sp_size divides `size`."""
        import torch.distributed as dist

        from wfm_ds.ulysses.groups import sequence_group

        if sp_size == 1:
            return replace(self, replica=None)
        timeout, host_group = datetime.timedelta(seconds=self.timeout_s), None
        group = sequence_group(sp_size, timeout)
        if self.device.type != "cpu":
            host_group = sequence_group(sp_size, timeout, backend="gloo")
        leaders = dist.new_group(list(range(0, self.size, sp_size)), backend="gloo", timeout=timeout)
        return replace(self, replica=Replica(sp_size, group, host_group or group, leaders))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sp_size(self) -> int:
        """Ranks of a replica."""
        return 1 if self.replica is None else self.replica.size

    @property
    def sp_rank(self) -> int:
        return self.rank % self.sp_size

    @property
    def dp_rank(self) -> int:
        """The number of this rank's replica."""
        return self.rank // self.sp_size

    @property
    def dp_size(self) -> int:
        """Replicas."""
        return self.size // self.sp_size

    @property
    def is_leader(self) -> bool:
        """Return whether this rank does what its replica needs only once: reads data, decodes, asks rewards."""
        return self.sp_rank == 0

    def _reduce(self, values: Mapping[str, float], op: Any) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        if self.size == 1 or not values:  # every rank passes the same names, so that all leave here or none
            return {name: float(value) for name, value in values.items()}
        LIVENESS.begin(f"a reduction of {', '.join(values)}"[:80])
        numbers = torch.tensor([float(v) for v in values.values()], dtype=torch.float64)
        dist.all_reduce(numbers, op=op, group=self.host_group)
        return dict(zip(values, numbers.tolist(), strict=True))

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks, in float64. Every rank passes the same names in the same order."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def replica_sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over replicas, of what their leaders pass, on every rank. Every rank passes the same names in the same
        order."""
        return self.sums(values if self.is_leader else dict.fromkeys(values, 0.0))

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over ranks. Every rank passes the same names in the same order."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is up on any rank: a local fact becomes a decision of all."""
        return self.maxima({"flag": float(flag)})["flag"] > 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. Others pass anything."""
        if self.size == 1:
            return _as_received(value)
        LIVENESS.begin("a broadcast of rank 0's value")
        return _json_from(0, self.host_group, value if self.is_main else None, mine=self.is_main)

    def share(self, value: Any) -> Any:
        """The leader's JSON value on every rank of its replica, which all call it. Others pass anything."""
        if self.replica is None:
            return value
        LIVENESS.advance("a broadcast inside a replica")  # how often differs between replicas: no number to compare
        return _json_from(self.rank - self.sp_rank, self.replica.host_group, value, mine=self.is_leader)

    def share_tensor(self, tensor: Tensor | None) -> Tensor:
        """The leader's tensor on the device of every rank of its replica, which all call it. Others pass None."""
        import torch
        import torch.distributed as dist

        if self.replica is None:
            assert tensor is not None
            return tensor
        leads = None if tensor is None else (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        shape, dtype = self.share(leads)
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        tensor = tensor.to(self.device).contiguous()
        dist.broadcast(tensor, src=self.rank - self.sp_rank, group=self.replica.group)
        return tensor

    def moved(self, tensor: Tensor, source: int, target: int) -> Tensor:
        """Replica `source`'s tensor on replica `target`, over the host; the ranks of both call it, and of others none.
        The target passes any tensor of its shape and dtype. Calls of all ranks follow one order."""
        import torch
        import torch.distributed as dist

        LIVENESS.advance("a tensor of another replica")
        if self.dp_rank == source:
            dist.send(
                tensor.detach().cpu().contiguous(), dst=target * self.sp_size + self.sp_rank, group=self.host_group
            )
            return tensor
        received = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        dist.recv(received, src=source * self.sp_size + self.sp_rank, group=self.host_group)
        return received.to(tensor.device)

    def joined_rows(self, rows: npt.NDArray[np.uint8], counts: Sequence[int]) -> npt.NDArray[np.uint8]:
        """On the leader the uint8 rows of all ranks of its replica, in their order, which all call it; [0] on the
        others. counts: rows of each rank, at most as many as the leader's, and all of one shape."""
        import torch
        import torch.distributed as dist

        if self.replica is None:
            return rows
        LIVENESS.advance("a gathering of rows inside a replica")
        group, first = self.replica.host_group, self.rank - self.sp_rank
        if not self.is_leader:
            if len(rows):
                dist.send(torch.from_numpy(rows), dst=first, group=group)
            return np.empty(0, np.uint8)
        joined = np.empty((sum(counts), *rows.shape[1:]), np.uint8)
        joined[: len(rows)] = rows
        place = len(rows)
        for rank, count in enumerate(counts[1:], start=1):
            if count:
                dist.recv(torch.from_numpy(joined[place : place + count]), src=first + rank, group=group)
            place += count
        return joined

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank, on every rank."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return [_as_received(value)]
        LIVENESS.begin("a gathering of values")
        blob = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(blob)], dtype=torch.int64), group=self.host_group)
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        all_blobs = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_blobs, mine, group=self.host_group)
        return [json.loads(b[: int(n)].numpy().tobytes()) for b, n in zip(all_blobs, lengths, strict=True)]

    def replica_gather(self, value: Any) -> list[Any]:
        """The JSON values of the leaders, by replica, on every rank. Others pass anything."""
        return self.gather(value if self.is_leader else None)[:: self.sp_size]

    def replica_gather_arrays(self, array: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """The uint8 arrays of the leaders, who alone call it, by replica, on rank 0; nothing on the others. All pass
        the same shape."""
        import torch
        import torch.distributed as dist

        if self.dp_size == 1:
            return [array.copy()]
        mine = torch.from_numpy(array.copy())
        arrays = [torch.empty_like(mine) for _ in range(self.dp_size)] if self.is_main else []
        group = self.host_group if self.replica is None else self.replica.leaders
        dist.gather(mine, arrays or None, dst=0, group=group)
        return [a.numpy() for a in arrays]

    def patiently(self, work: Callable[[], Any], *, here: bool | None = None) -> Any:
        """Run `work` on rank 0, or on the ranks that say `here`, while the others wait as long as it takes, beyond the
        limit of one collective: what it returned there, None on the others. A UserError is raised on all ranks."""
        works = self.is_main if here is None else here
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work) if works else None
            while self.any(running is not None and not futures.wait([running], PATIENCE_S).done):
                pass
            return self.checked(running.result if running is not None else lambda: None)

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.size == 1:
            return
        LIVENESS.begin("a barrier")
        dist.barrier(group=self.host_group)

    def checked(self, work: Callable[[], Any], on: Literal["all", "leaders", "main"] = "all") -> Any:
        """Run `work` on these ranks (`main`: rank 0) and agree: a UserError anywhere is raised everywhere.

        Returns what it returned here, None on ranks that did not run it. No rank is left waiting for a failed one.
        """
        result, error = None, None
        if {"all": True, "leaders": self.is_leader, "main": self.is_main}[on]:
            try:
                result = work()
            except UserError as raised:
                error = raised
        if self.any(error is not None):
            messages = self.gather(None if error is None else str(error))
            everywhere = UserError(next(m for m in messages if m is not None))
            everywhere.agreed = True
            raise everywhere from error
        return result


def _as_received(value: Any) -> Any:
    """The JSON value as other ranks would get it: with lists for tuples, and text for the keys of a mapping."""
    return json.loads(json.dumps(value))


def _json_from(source: int, group: ProcessGroup | None, value: Any, *, mine: bool) -> Any:
    """The JSON value of rank `source` on every rank of the group, which all call it; `mine`: on that rank."""
    import torch
    import torch.distributed as dist

    blob = json.dumps(value).encode() if mine else b""
    length = torch.tensor([len(blob)], dtype=torch.int64)
    dist.broadcast(length, src=source, group=group)
    payload = torch.zeros(int(length), dtype=torch.uint8)
    if mine:
        payload.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
    dist.broadcast(payload, src=source, group=group)
    return json.loads(payload.numpy().tobytes())


def ranks_per_node(world_size: int) -> int:
    """Ranks of this host, as the launcher says; without one, all."""
    return int(os.environ.get("LOCAL_SIZE", world_size))


def free_port() -> int:
    """A TCP port that was free a moment ago on the loopback interface."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def threads_per_rank() -> int:
    """CPU threads for one rank: OMP_NUM_THREADS if the user set it, else this host's cores shared by its ranks."""
    if "OMP_NUM_THREADS" in os.environ:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_SIZE", "1")))
