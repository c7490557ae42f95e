"""All ranks are about to do the same forward, or there is one clear error instead of an endless hang."""

from __future__ import annotations

import datetime
import zlib

import torch
import torch.distributed as dist

from wfm_ds.world import World


class Guard:
    """Counts the forwards and compares them between ranks. Every rank builds it, at the same point."""

    def __init__(self, world: World, timeout_s: float = 60.0) -> None:
        self._world = world
        self._timeout_s = timeout_s
        # A group of its own: it cannot pair with another collective, and its deadline is short.
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self.num_checks = 0

    def check(self, *what: object) -> None:
        """Every rank, before a forward; `what` tells forwards apart (policy, with or without gradient, shape, ...).

        Raises RuntimeError on all ranks if they disagree, or if one of them does not come within the deadline.
        """
        self.num_checks += 1
        mark = zlib.crc32(repr((self.num_checks, what)).encode())
        both = torch.tensor([mark, -mark])  # their maxima are opposite only if all marks are equal
        try:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._world.rank} is at forward {self.num_checks} {what}, and another rank did not come "
                f"within {self._timeout_s:g} s: all ranks must do the same forwards"
            ) from error
        if int(both[0]) != -int(both[1]):
            seen = self._world.gather(repr(what))
            raise RuntimeError(f"ranks disagree at forward {self.num_checks}: {seen}")
