"""Replicas of several ranks: rank numbering, broadcasts from leaders, and sums with one contribution per replica."""

import numpy as np
import torch

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.engine.step_checks import RankGuard
from wfm_ds.errors import DataError, UserError


def places(sp):
    world = World.join().with_replicas(sp)
    return [world.sp_size, world.sp_rank, world.dp_size, world.dp_rank, float(world.is_leader)]


def collectives(sp):
    world = World.join().with_replicas(sp)
    of_leader = torch.arange(6.0).view(2, 3) + world.rank if world.is_leader else None
    own = np.full((2, 1), world.rank, np.uint8)
    num_begun = LIVENESS.num_started
    shared = world.broadcast_in_replica({"rank": world.rank})
    assert LIVENESS.num_started == num_begun  # compared across ranks; replicas may broadcast unequally often
    return {
        "replica_sums": world.sum_over_replicas({"work": 10.0**world.rank})["work"],
        "sums": world.sum_over_ranks({"shards": 10.0**world.rank})["shards"],
        "replica_gather": world.gather_from_leaders([world.rank]),
        "share": shared,
        "share_tensor": world.broadcast_tensor_in_replica(of_leader),
        "arrays": [array.tolist() for array in world.gather_leader_arrays(own)] if world.is_leader else None,
        "leaders": world.run_checked(lambda: world.rank, on="leaders"),
    }


def failing_leader(sp, rank):
    """Raise an error on one rank, and return the message that this rank gets."""
    world = World.join().with_replicas(sp)

    def read():
        if world.rank == rank:
            raise DataError(f"rank {rank} cannot read")
        return world.rank

    try:
        return world.run_checked(read, on="leaders")
    except DataError as error:
        return f"itself: {error}"
    except UserError as error:
        return f"{type(error).__name__}: {error}" if error.agreed else "not known to be on all ranks"


def test_two_ranks_are_one_replica(two_ranks):
    assert two_ranks.run(places, sp=1) == [[1, 0, 2, 0, 1.0], [1, 0, 2, 1, 1.0]]
    assert two_ranks.run(places, sp=2) == [[2, 0, 1, 0, 1.0], [2, 1, 1, 0, 0.0]]


def test_four_ranks_are_two_replicas_of_neighbours(four_ranks):
    assert [answer[:4] for answer in four_ranks.run(places, sp=2)] == [
        [2, 0, 2, 0],
        [2, 1, 2, 0],
        [2, 0, 2, 1],
        [2, 1, 2, 1],
    ]
    for rank, found in enumerate(four_ranks.run(collectives, sp=2)):
        leader = rank - rank % 2
        assert (found["replica_sums"], found["sums"]) == (101.0, 1111.0)
        assert found["replica_gather"] == [[0], [2]]
        assert found["share"] == {"rank": leader}
        assert found["share_tensor"].tolist() == (torch.arange(6.0).view(2, 3) + leader).tolist()
        assert found["arrays"] == {0: [[[0], [0]], [[2], [2]]], 2: []}.get(rank)
        assert found["leaders"] == (rank if rank == leader else None)
    assert four_ranks.run(failing_leader, sp=2, rank=2)[:2] == ["UserError: rank 2 cannot read"] * 2


def test_the_leader_broadcasts_and_counts_for_its_replica(two_ranks):
    for rank, found in enumerate(two_ranks.run(collectives, sp=2)):
        assert (found["replica_sums"], found["sums"]) == (1.0, 11.0)
        assert found["replica_gather"] == [[0]]
        assert found["share"] == {"rank": 0}
        assert found["share_tensor"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert found["leaders"] == (None if rank else 0)
    for rank, found in enumerate(two_ranks.run(collectives, sp=1)):
        assert found["replica_sums"] == found["sums"] == 11.0
        assert found["replica_gather"] == [[0], [1]]
        assert found["share"] == {"rank": rank}


def test_all_ranks_of_a_replica_get_the_leaders_error(two_ranks):
    assert two_ranks.run(failing_leader, sp=2, rank=0) == ["UserError: rank 0 cannot read"] * 2
    assert two_ranks.run(failing_leader, sp=2, rank=1) == [0, None]  # rank 1 is not a leader and does not call read()


def test_the_replica_size_must_divide_the_number_of_ranks(two_ranks):
    for message in two_ranks.run(uneven):
        assert message == "engine.sequence_parallel = 3 does not divide the 2 ranks; use one of 1, 2"


def uneven():
    try:
        World.join().with_replicas(3)
    except UserError as error:
        return str(error)


def guarded(sp, apart):
    """Return the guard's error message if inputs differ between ranks by `apart` units in the last place."""
    world = World.join().with_replicas(sp)
    guard = RankGuard(world)
    latents = torch.ones(2, 3) + (2**-23 * apart if world.rank else 0)
    try:
        guard.compare_ranks("train", True, inputs=(latents, torch.tensor([0.5])))
        guard.compare_ranks("train", True, inputs=(torch.ones(1, dtype=torch.bfloat16),))
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_the_guard_compares_the_inputs_of_a_replica(two_ranks):
    assert two_ranks.run(guarded, sp=2, apart=0) == ["agreed"] * 2
    assert two_ranks.run(guarded, sp=1, apart=1) == ["agreed"] * 2  # inputs may differ between replicas
    for message in two_ranks.run(guarded, sp=2, apart=1):
        assert message.startswith("forward pass 1 ('train', True): the ranks of the replicas [0] hold different inputs")
