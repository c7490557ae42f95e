"""The processes of a soak: find them by role, watch their memory, find what they left."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

MARK = "WFM_SOAK"  # environment variable that all processes inherit
ROLES = {
    "reward service": "wfm_reward.serve",
    "reward worker": "wfm_reward.worker",
    "rollout worker": "benchmarks.soak.worker",
}
MAX_GROWTH_MIB = 4.0  # between the first and the last third of a life; due to allocators, and ids that brokers keep
MAX_MORE_DESCRIPTORS = 8  # clients that are just connecting
Look = tuple[int, float, int]  # pid, MiB, file descriptors


def alive_processes(host: psutil.Process, role: str) -> list[psutil.Process]:
    """Return the running processes of a role among the descendants of the host."""
    # Compare parent and module: between fork and exec a child looks like its parent.
    parents = alive_processes(host, "reward service") if role == "reward worker" else [host]
    found = []
    for parent in parents:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child for child in parent.children() if _process_module(child) == ROLES[role]]
    return found


def _process_module(process: psutil.Process) -> str:
    """Return MODULE of a process `python -m MODULE`; "" for other or exited processes."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[2] if words[1:2] == ["-m"] else ""


def find_leftovers(mark: str) -> list[psutil.Process]:
    """Return processes with this mark, including orphans, except this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # exited, zombie, or of another user
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def find_shared_memory(mark: str) -> set[Path]:
    """Return the files of /dev/shm that marked processes have mapped."""
    paths: set[Path] = set()
    for process in find_leftovers(mark):
        with contextlib.suppress(psutil.Error):
            paths |= {Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return paths


class MemoryLog:
    """Memory and file descriptors of processes over time, by name. A process may be replaced by another one."""

    def __init__(self) -> None:
        self.looks: defaultdict[str, list[Look]] = defaultdict(list)

    def add_sample(self, name: str, pid: int) -> None:
        """Record the memory and descriptors of a process, or nothing if it has ended."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if mib := process.memory_info().rss / 2**20:  # otherwise it is a zombie
                self.looks[name].append((pid, mib, process.num_fds()))

    def find_growth(self) -> list[str]:
        return [message for name, looks in self.looks.items() for message in find_growth(name, looks)]


def find_growth(name: str, looks: Sequence[Look]) -> list[str]:
    """Return a message for each resource that grows from the first to the last third of the longest life."""
    longest, _ = Counter(pid for pid, _, _ in looks).most_common(1)[0]
    life = [look for look in looks if look[0] == longest]
    life = life[len(life) // 10 :]  # ignore the start of the process
    third = max(1, len(life) // 3)
    mib, descriptors = (
        statistics.median(look[i] for look in life[-third:]) - statistics.median(look[i] for look in life[:third])
        for i in (1, 2)
    )
    found = [f"{name} grew by {mib:.1f} MiB; the limit is {MAX_GROWTH_MIB:g}"] if mib > MAX_GROWTH_MIB else []
    if descriptors > MAX_MORE_DESCRIPTORS:
        found.append(f"{name} has {descriptors:.0f} more descriptors; the limit is {MAX_MORE_DESCRIPTORS}")
    return found
