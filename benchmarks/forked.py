"""Ranks of a run as forks of this process, which has imported everything: they start in no time, and die together.

For studies that start the same command again and again. This process must have no threads and no process group of
torch's, and a forked rank none of CUDA: it is for CPUs.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# What Python tells an audit hook when a file is opened (to be written, or to be flushed to the disk), made or removed.
# https://docs.python.org/3/library/audit_events.html
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.truncate")
DEADLINE_S = 600.0  # ends a hang, and measures nothing
COUNT = struct.Struct("q")


@dataclass(frozen=True, slots=True)
class AtFile:
    """Kill when this rank begins its `number`th operation on a file or folder below the watched one; 1 is the first."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """Kill this many seconds after the start."""

    seconds: float


Moment = AtFile | AtTime | None
"""When all ranks are killed; None: never."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one start of the ranks."""

    exit_codes: tuple[int, ...]  # by rank; -9 if it was killed
    seconds: float
    file_operations: tuple[int, ...]  # by rank, below the watched folder

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.exit_codes


def start(arguments: Sequence[str], num_ranks: int, *, moment: Moment, watched: Path, scratch: Path) -> Ended:
    """`python -m wfm_ds.train ARGUMENTS` on these ranks, until they end or `moment` comes; then all of them are killed
    with SIGKILL, at once.

    scratch: a folder for the group's store and the ranks' output, `rank_0.log` and so on. Raises RuntimeError at the
    deadline, and if the ranks ended in different ways, unless `is_legitimate`.
    """
    store = scratch / f"store_{time.monotonic_ns()}"
    counts = mmap.mmap(-1, COUNT.size * num_ranks)  # shared with the forks
    began, pids = time.monotonic(), list[int]()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, pids, arguments, store, scratch, moment, watched, counts)
        os.setpgid(pid, pids[0] if pids else pid)  # here and there: whoever comes first
        pids.append(pid)
    if isinstance(moment, AtTime):
        _wait(pids, moment.seconds)
        _kill(pids[0])
    if not _wait(pids, DEADLINE_S):
        _kill(pids[0])
        raise RuntimeError(f"the ranks did not end within {DEADLINE_S:g} s; they wrote {scratch}/rank_*.log")
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    codes = tuple(os.waitstatus_to_exitcode(status) for status in statuses)
    if not is_legitimate(codes, moment):
        raise RuntimeError(f"the ranks ended with {codes}; they wrote {scratch}/rank_*.log")
    file_operations = tuple(COUNT.unpack_from(counts, COUNT.size * rank)[0] for rank in range(num_ranks))
    return Ended(codes, time.monotonic() - began, file_operations)


def is_legitimate(codes: Sequence[int], moment: Moment) -> bool:
    """Return whether the ranks may end with these exit codes: all with the same one or, killed at a time, some before
    the kill reached them: with 0 because they were done, with 1 because the heartbeat missed another rank."""
    if len(set(codes)) == 1:
        return True
    return isinstance(moment, AtTime) and -signal.SIGKILL in codes and set(codes) <= {0, 1, -signal.SIGKILL}


def _kill(group: int) -> None:
    os.killpg(group, signal.SIGKILL)  # its first member is not reaped yet, so the number is nobody else's


def _wait(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait for all of them. False if one did not end in time. Reaps none."""
    until, descriptors = time.monotonic() + timeout_s, [os.pidfd_open(pid) for pid in pids]
    left = list(descriptors)
    try:
        while left and (remaining := until - time.monotonic()) > 0:
            ended, _, _ = select.select(left, [], [], remaining)
            left = [descriptor for descriptor in left if descriptor not in ended]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return not left


def _be_rank(
    rank: int,
    num_ranks: int,
    earlier: Sequence[int],
    arguments: Sequence[str],
    store: Path,
    scratch: Path,
    moment: Moment,
    watched: Path,
    counts: mmap.mmap,
) -> NoReturn:
    """The life of a fork; never returns into the code of its parent."""
    code = 1
    try:
        os.setpgid(0, earlier[0] if earlier else 0)
        output = os.open(scratch / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        mine = moment.number if isinstance(moment, AtFile) and moment.rank == rank else 0
        _watch(watched, rank, counts, kill_at=mine)
        code = _train(rank, num_ranks, arguments, store)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:  # noqa: BLE001, the border of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch(watched: Path, rank: int, counts: mmap.mmap, *, kill_at: int) -> None:
    below, seen = str(watched), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and arguments and str(arguments[0]).startswith(below):
            seen += 1
            COUNT.pack_into(counts, COUNT.size * rank, seen)
            if seen == kill_at:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(hook)


def _train(rank: int, num_ranks: int, arguments: Sequence[str], store: Path) -> int:
    import torch
    import torch.distributed as dist

    from wfm_ds import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return train.main(arguments)
