"""Groups of ranks that share the tokens of one sample."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from wfm_ds.errors import UserError


def sequence_group(num_ranks: int, timeout: timedelta | None = None, backend: str | None = None) -> ProcessGroup:
    """Collective over all ranks: this rank's group of `num_ranks` neighbours, ranks [i * num_ranks, (i+1) * num_ranks).

    Neighbours, because the exchanges want the fast links within a node. timeout: of its collectives, None for torch's
    default; backend: None for that of all ranks. Raises UserError if the groups do not come out even.
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
