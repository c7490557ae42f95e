"""One clear error in place of an endless hang, where ranks are not about to do the same forward or the ranks of a
replica do not have the same numbers."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wfm_ds.distributed.world import World


class Guard:
    """Counts the forwards and compares them between ranks. Every rank builds it, at the same point.

    It waits for the others as long as any collective of `world` does: one that decodes videos or compiles is late and
    not lost.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A group of its own: it cannot pair with another collective.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=world.timeout_s))
        self.num_checks = 0

    def check(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Compare the ranks; every rank calls it before a forward.

        `what` tells forwards apart (policy, with or without gradient, shape, ...) and
        is the same on all ranks, `inputs` are bit-equal on the ranks of a replica.

        Raises RuntimeError on all ranks if they disagree, or if one of them does not come within the deadline.
        """
        self.num_checks += 1
        world = self._world
        marks = torch.full((1 + world.dp_size, 2), -(2**40))  # of all ranks, then of each replica: any mark is larger
        marks[0] = _pair(zlib.crc32(repr((self.num_checks, what)).encode()))
        if world.sp_size > 1:
            marks[1 + world.dp_rank] = _pair(fingerprint(inputs))
        try:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {world.rank} is at forward {self.num_checks} {what}, and another rank did not come "
                f"within {world.timeout_s:g} s: all ranks must do the same forwards"
            ) from error
        if int(marks[0].sum()):
            seen = world.gather(repr(what))
            raise RuntimeError(f"ranks disagree at forward {self.num_checks}: {seen}")
        split = [replica for replica, both in enumerate(marks[1:]) if world.sp_size > 1 and int(both.sum())]
        if split:
            raise RuntimeError(
                f"forward {self.num_checks} {what}: the ranks of the replicas {split} hold different inputs, but they "
                "must work on the same samples"
            )


def _pair(mark: int) -> torch.Tensor:
    """[mark, -mark]: the sum of their maxima over ranks is 0 only if all marks are equal."""
    return torch.tensor([mark, -mark])


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A checksum of the tensors' bytes."""
    mark = 0
    for tensor in tensors:
        mark = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), mark)
    return mark
