"""Process groups for sequence parallelism."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from wfm_ds.errors import UserError


def create_sequence_group(num_ranks: int, timeout: timedelta | None = None, backend: str | None = None) -> ProcessGroup:
    """Create the sequence-parallel groups and return this rank's group. Collective over all ranks.

    A group has `num_ranks` consecutive ranks, to use the fast links within a node. timeout: timeout of the group's
    collectives; None for torch's default. backend: None for the default group's backend. Raises UserError if num_ranks
    does not divide the number of ranks.
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
