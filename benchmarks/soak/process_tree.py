"""The processes of a soak: find them by role, and find leftovers at the end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

MARK = "WFM_SOAK"  # environment variable that all processes inherit
ROLES = {
    "reward service": "wfm_reward.serve",
    "reward worker": "wfm_reward.worker",
    "rollout worker": "benchmarks.soak.worker",
}


class ProcessTree:
    """The descendants of the host, by role."""

    def __init__(self, host: int) -> None:
        self._host = psutil.Process(host)

    def alive_processes(self, role: str) -> list[psutil.Process]:
        """Return the running processes of a role."""
        # Compare parent and module: between fork and exec a child looks like its parent.
        parents = self.alive_processes("reward service") if role == "reward worker" else [self._host]
        found = []
        for parent in parents:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child for child in parent.children() if _process_module(child) == ROLES[role]]
        return found

    def count_processes(self) -> dict[str, int]:
        return {role: len(self.alive_processes(role)) for role in ROLES}


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
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # exited, zombie, or of another user
    return found


def find_shared_memory(mark: str) -> set[Path]:
    """Return the files of /dev/shm that marked processes have mapped."""
    paths: set[Path] = set()
    for process in find_leftovers(mark):
        try:
            paths |= {Path(m.path) for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
        except psutil.Error:
            continue
    return paths
