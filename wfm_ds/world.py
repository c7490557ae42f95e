"""Who am I among the ranks, and the few collectives that are not DeepSpeed's: small values over gloo on the CPU."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wfm_ds.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

COLLECTIVE_TIMEOUT_S = 1800.0
PATIENCE_S = 10.0  # between two signs of life of a rank that the others wait for


@dataclass(frozen=True, slots=True)
class World:
    """This process among `size`; `host_group` is a gloo group for flags, counts and texts."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    host_group: ProcessGroup | None  # None: the default group

    @classmethod
    def join(cls, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> World:
        """Every rank calls it once, before anything else that communicates. Without a launcher: a world of one."""
        import deepspeed
        import torch
        import torch.distributed as dist

        if "RANK" not in os.environ:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
            os.environ["MASTER_PORT"] = str(free_port())
        timeout = datetime.timedelta(seconds=timeout_s)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
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
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, device, host_group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def _reduce(self, values: Mapping[str, float], op: Any) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        numbers = torch.tensor([float(v) for v in values.values()], dtype=torch.float64)
        dist.all_reduce(numbers, op=op, group=self.host_group)
        return dict(zip(values, numbers.tolist(), strict=True))

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums over ranks, in float64. Every rank passes the same names in the same order."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over ranks. Every rank passes the same names in the same order."""
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank: a local fact becomes a decision of all."""
        return self.maxima({"flag": float(flag)})["flag"] > 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. Others pass anything."""
        import torch
        import torch.distributed as dist

        blob = json.dumps(value).encode() if self.is_main else b""
        length = torch.tensor([len(blob)], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self.host_group)
        payload = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_main:
            payload.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        dist.broadcast(payload, src=0, group=self.host_group)
        return json.loads(payload.numpy().tobytes())

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank, on every rank."""
        import torch
        import torch.distributed as dist

        blob = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(blob)], dtype=torch.int64), group=self.host_group)
        longest = max(int(n) for n in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        all_blobs = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_blobs, mine, group=self.host_group)
        return [json.loads(b[: int(n)].numpy().tobytes()) for b, n in zip(all_blobs, lengths, strict=True)]

    def gather_arrays(self, array: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """The uint8 arrays of all ranks, by rank, on rank 0; nothing on the others. Every rank passes the same
        shape."""
        import torch
        import torch.distributed as dist

        mine = torch.from_numpy(array.copy())
        arrays = [torch.empty_like(mine) for _ in range(self.size)] if self.is_main else []
        dist.gather(mine, arrays or None, dst=0, group=self.host_group)
        return [a.numpy() for a in arrays]

    def patiently(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0, while the others wait as long as it takes, beyond the limit of one collective: JSON
        that it returned there, None on the others. A UserError is raised on all ranks."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work) if self.is_main else None
            while self.any(running is not None and not futures.wait([running], PATIENCE_S).done):
                pass
            return self.checked(running.result if running is not None else lambda: None, on="main")

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.host_group)

    def checked(self, work: Callable[[], Any], on: str = "all") -> Any:
        """Run `work` on all ranks (`on="main"`: rank 0 alone) and agree: a UserError anywhere is raised everywhere.

        Returns what it returned here, None on ranks that did not run it. No rank is left waiting for a failed one.
        """
        result, error = None, None
        if on == "all" or self.is_main:
            try:
                result = work()
            except UserError as raised:
                error = raised
        if self.any(error is not None):
            messages = self.gather(None if error is None else str(error))
            raise UserError(next(m for m in messages if m is not None)) from error
        return result


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
