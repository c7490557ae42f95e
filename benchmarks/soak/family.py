"""The processes of a soak: who they are, and what of them is left at the end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

MARK = "WFM_SOAK"  # an environment variable that all of them inherit
ROLES = {
    "reward service": "wfm_reward.serve",
    "reward worker": "wfm_reward.worker",
    "rollout worker": "benchmarks.soak.worker",
}


class Family:
    """The descendants of the host, by their roles."""

    def __init__(self, host: int) -> None:
        self._host = psutil.Process(host)

    def alive(self, role: str) -> list[psutil.Process]:
        """The processes of a role that are alive."""
        # By parent and module: between fork and exec a child looks like its parent.
        parents = self.alive("reward service") if role == "reward worker" else [self._host]
        found = []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child for child in parent.children() if _module(child) == ROLES[role]]
        return found

    def sizes(self) -> dict[str, int]:
        return {role: len(self.alive(role)) for role in ROLES}


def _module(process: psutil.Process) -> str:
    """MODULE of a process `python -m MODULE`; "" if it is another one or has ended."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return words[2] if words[1:2] == ["-m"] else ""


def left_over(mark: str) -> list[psutil.Process]:
    """Processes, orphans too, that were started with this mark, other than this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # ended, a zombie, or another user's
    return found


def shared_memory(mark: str) -> set[Path]:
    """Files of /dev/shm that the marked processes have mapped."""
    paths: set[Path] = set()
    for process in left_over(mark):
        try:
            paths |= {Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        except psutil.Error:
            continue
    return paths
