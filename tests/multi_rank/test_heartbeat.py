"""If one rank cannot start its heartbeat, all ranks stop with the same error."""

import os
import threading

from wfm_ds.distributed.heartbeat import start_heartbeat
from wfm_ds.distributed.world import World
from wfm_ds.errors import UserError

FAR = "127.0.0.2"  # on one machine rank 0 listens on 127.0.0.1 only


def started(addresses):
    """Connect to rank 0 at this rank's address. Return the error message and the heartbeat threads still running."""
    world, address, said = World.join(), os.environ["MASTER_ADDR"], []
    os.environ["MASTER_ADDR"] = addresses[world.rank]
    try:
        beating = start_heartbeat(world, stuck_s=600.0, on_end=said.append)
    except UserError as error:
        message = str(error)
    else:
        beating.stop()
        message = ""
    finally:
        os.environ["MASTER_ADDR"] = address
    running = [thread.name for thread in threading.enumerate() if thread.name in ("heartbeat", "rank-states")]
    return [message, *said, *running]


def test_a_rank_that_cannot_reach_rank_0_ends_all_with_one_error(two_ranks):
    assert two_ranks.run(started, addresses=["127.0.0.1", "127.0.0.1"]) == [[""], [""]]
    first, second = two_ranks.run(started, addresses=["127.0.0.1", FAR])
    assert first == second
    assert len(first) == 1  # only the message: no fault was reported and no thread runs
    assert f"cannot reach rank 0 at {FAR}:" in first[0]
