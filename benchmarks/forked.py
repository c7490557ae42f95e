"""Run the ranks of a training as forks of this process, which has already imported everything.

For studies that start the same command many times: forks start fast and can be killed together. This process must have
no threads and no torch process group, and forked ranks cannot use CUDA. CPU only.
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

# Audit events of operations on files and folders. https://docs.python.org/3/library/audit_events.html
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.truncate")
DEADLINE_S = 600.0  # only a limit for hanging ranks
COUNT = struct.Struct("q")


@dataclass(frozen=True, slots=True)
class AtFile:
    """Kill when this rank starts its `number`th operation on a file or folder inside the watched folder; 1 is the
    first."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """Kill this many seconds after the start."""

    seconds: float


Moment = AtFile | AtTime | None
"""When to kill all ranks; None: never."""


@dataclass(frozen=True, slots=True)
class RanksExit:
    """The result of one start of the ranks."""

    exit_codes: tuple[int, ...]  # by rank; -9 if killed
    seconds: float
    file_operations: tuple[int, ...]  # by rank, inside the watched folder

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.exit_codes


def start_ranks(arguments: Sequence[str], num_ranks: int, *, moment: Moment, watched: Path, scratch: Path) -> RanksExit:
    """Run `python -m wfm_ds.train ARGUMENTS` on these ranks until they exit, or until `moment`, when all are killed
    with SIGKILL at the same time.

    scratch: a folder for the group's store and the output of the ranks (`rank_0.log`, ...). Raises RuntimeError at the
    deadline, and if the exit codes are not expected (`is_expected_exit`).
    """
    store = scratch / f"store_{time.monotonic_ns()}"
    counts = mmap.mmap(-1, COUNT.size * num_ranks)  # shared with the forks
    began, pids = time.monotonic(), list[int]()
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_forked_rank(rank, num_ranks, pids, arguments, store, scratch, moment, watched, counts)
        os.setpgid(pid, pids[0] if pids else pid)  # in parent and child, because either may run first
        pids.append(pid)
    if isinstance(moment, AtTime):
        _wait_for_exit(pids, moment.seconds)
        _kill_group(pids[0])
    if not _wait_for_exit(pids, DEADLINE_S):
        _kill_group(pids[0])
        raise RuntimeError(f"the ranks did not exit within {DEADLINE_S:g} s; see {scratch}/rank_*.log")
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    codes = tuple(os.waitstatus_to_exitcode(status) for status in statuses)
    if not is_expected_exit(codes, moment):
        raise RuntimeError(f"the ranks exited with {codes}; see {scratch}/rank_*.log")
    file_operations = tuple(COUNT.unpack_from(counts, COUNT.size * rank)[0] for rank in range(num_ranks))
    return RanksExit(codes, time.monotonic() - began, file_operations)


def is_expected_exit(codes: Sequence[int], moment: Moment) -> bool:
    """Return whether the ranks may exit with these codes. Usually all codes are equal. If the ranks are killed at a
    time, some may have exited before the kill: with 0 because they were finished, or with 1 because the heartbeat lost
    a rank."""
    if len(set(codes)) == 1:
        return True
    return isinstance(moment, AtTime) and -signal.SIGKILL in codes and set(codes) <= {0, 1, -signal.SIGKILL}


def _kill_group(group: int) -> None:
    os.killpg(group, signal.SIGKILL)  # the first member is not reaped yet, so its number is not reused


def _wait_for_exit(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait until all processes have exited, without reaping them. Return False at the timeout."""
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


def _run_forked_rank(
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
    """Run one rank in a fork. Never returns into the code of the parent."""
    code = 1
    try:
        os.setpgid(0, earlier[0] if earlier else 0)
        output = os.open(scratch / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        kill_at = moment.number if isinstance(moment, AtFile) and moment.rank == rank else 0
        _count_file_events(watched, rank, counts, kill_at=kill_at)
        code = _train_rank(rank, num_ranks, arguments, store)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except Exception:  # noqa: BLE001, top level of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _count_file_events(watched: Path, rank: int, counts: mmap.mmap, *, kill_at: int) -> None:
    below, seen = str(watched), 0

    def count_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and arguments and str(arguments[0]).startswith(below):
            seen += 1
            COUNT.pack_into(counts, COUNT.size * rank, seen)
            if seen == kill_at:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(count_event)


def _train_rank(rank: int, num_ranks: int, arguments: Sequence[str], store: Path) -> int:
    import torch
    import torch.distributed as dist

    from wfm_ds import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return train.main(arguments)
