"""Detection of ranks that run different forward passes, or ranks of one replica with different inputs."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wfm_ds.distributed.world import World


class RankGuard:
    """Compares forward passes between ranks, so that a mismatch raises an error instead of hanging.

    Create it at the same point on every rank. It waits for other ranks as long as the collectives of `world` do,
    because a rank that is decoding videos or compiling is only late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # A separate group, so that it cannot pair with another collective.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=world.timeout_s))
        self.num_checks = 0

    def compare_ranks(self, *what: object, inputs: Sequence[Tensor] = ()) -> None:
        """Check that all ranks are about to run the same forward pass. Collective; call it before every forward pass.

        what: values that identify the forward pass (policy, gradient, shape, ...), equal on all ranks.
        inputs: tensors that must be bit-equal on the ranks of a replica.

        Raises RuntimeError on all ranks if they disagree, or if a rank does not call it within the timeout.
        """
        self.num_checks += 1
        world = self._world
        # Row 0 is for all ranks, row 1 + r for replica r. The initial value is lower than any checksum.
        marks = torch.full((1 + world.dp_size, 2), -(2**40))
        marks[0] = _signed_pair(zlib.crc32(repr((self.num_checks, what)).encode()))
        if world.sp_size > 1:
            marks[1 + world.dp_rank] = _signed_pair(tensor_checksum(inputs))
        try:
            dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {world.rank} is at forward pass {self.num_checks} {what}, and another rank did not reach "
                f"it within {world.timeout_s:g} s: all ranks must run the same forward passes"
            ) from error
        if int(marks[0].sum()):
            forwards = world.gather(repr(what))
            raise RuntimeError(f"ranks disagree at forward pass {self.num_checks}: {forwards}")
        different = [replica for replica, both in enumerate(marks[1:]) if world.sp_size > 1 and int(both.sum())]
        if different:
            raise RuntimeError(
                f"forward pass {self.num_checks} {what}: the ranks of the replicas {different} hold different inputs, "
                "but they must work on the same samples"
            )


def _signed_pair(mark: int) -> torch.Tensor:
    """Return [mark, -mark]. Their maxima over all ranks sum to 0 only if the marks of all ranks are equal."""
    return torch.tensor([mark, -mark])


def tensor_checksum(tensors: Sequence[Tensor]) -> int:
    mark = 0
    for tensor in tensors:
        mark = zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), mark)
    return mark
