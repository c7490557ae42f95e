"""Memory and file descriptors of processes over time, and a check for growth."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import psutil

WARM_UP = 0.1  # fraction of a life before its first third
MAX_GROWTH_MIB = 4.0  # from the first third to the last: allocators, and ids that brokers keep
MAX_MORE_DESCRIPTORS = 8  # clients that are just connecting


@dataclass(frozen=True, slots=True)
class MemorySample:
    pid: int
    rss_mib: float
    descriptors: int


class Histories:
    """Memory over time by process name. A process may be replaced by another one."""

    def __init__(self) -> None:
        self._looks: defaultdict[str, list[MemorySample]] = defaultdict(list)

    def add_sample(self, name: str, process: psutil.Process) -> None:
        """Record the memory and descriptors of a process, or nothing if it has just ended."""
        with contextlib.suppress(psutil.Error):
            look = MemorySample(process.pid, process.memory_info().rss / 2**20, process.num_fds())
            if look.rss_mib:  # otherwise it is a zombie
                self._looks[name].append(look)

    def rows(self) -> list[dict[str, Any]]:
        return [_history_row(name, looks) for name, looks in self._looks.items()]


def _history_row(name: str, looks: list[MemorySample]) -> dict[str, Any]:
    """Return a row about all lives of a process, and the first and last third of the longest life."""
    lives = Counter(look.pid for look in looks)
    longest, _ = lives.most_common(1)[0]
    life = [look for look in looks if look.pid == longest]
    life = life[int(len(life) * WARM_UP) :]
    third = max(1, len(life) // 3)
    first, last = life[:third], life[-third:]
    rss = [look.rss_mib for look in looks]
    return {
        "process": name,
        "lives": len(lives),
        "MiB at first": rss[0],
        "MiB at most": max(rss),
        "MiB at last": rss[-1],
        "MiB, first third": statistics.median(look.rss_mib for look in first),
        "MiB, last third": statistics.median(look.rss_mib for look in last),
        "descriptors, first third": int(statistics.median(look.descriptors for look in first)),
        "descriptors, last third": int(statistics.median(look.descriptors for look in last)),
    }


def find_growth(rows: list[dict[str, Any]]) -> list[str]:
    """Return a message for each process that grows."""
    found = []
    for row in rows:
        mib = row["MiB, last third"] - row["MiB, first third"]
        more = row["descriptors, last third"] - row["descriptors, first third"]
        if mib > MAX_GROWTH_MIB:
            found.append(f"{row['process']} grew by {mib:.1f} MiB; the limit is {MAX_GROWTH_MIB:g}")
        if more > MAX_MORE_DESCRIPTORS:
            found.append(f"{row['process']} has {more} more descriptors; the limit is {MAX_MORE_DESCRIPTORS}")
    return found
