"""An allocation that failed, as one sentence: in which phase, how much there was, and what to lower.

The limit is the user's to mend, by the recipe's keys, so it ends a command as a UserError does. Nothing is saved then:
the device has no room, and the checkpoint before is complete.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

from wfm_ds.errors import RunError, UserError, is_out_of_memory
from wfm_ds.monitoring.stopwatch import GIB

ASKED = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


class OutOfMemory(UserError):
    """The memory of this rank's device does not suffice."""


@contextmanager
def explained(
    device: torch.device, advice: Callable[[str], Sequence[str]], phase: Callable[[], str | None]
) -> Iterator[None]:
    """Inside, an allocation that fails raises OutOfMemory with its sentence.

    phase: the one that the error left, None for none. advice: what to change for a phase (or ""), best first.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RunError) or not is_out_of_memory(error):  # a RunError may tell of another process's
            raise
        name = phase() or ""
        raise OutOfMemory(sentence(error, device, name, advice(name))) from error


def sentence(error: BaseException, device: torch.device, phase: str, advice: Sequence[str]) -> str:
    """`out of memory on cuda:0 in the phase train: 2.0 GiB more were asked for, ...; change KEY or KEY`."""
    found = ASKED.search(str(error))
    asked = f"{_amount(float(found[1]) * UNITS[found[2]])} more were asked for, " if found else ""
    where = f" in the phase {phase}" if phase else ""
    change = f"; change {', or '.join(advice)}" if advice else ""
    return f"out of memory on {device}{where}: {asked}{usage(device)}{change}"


def usage(device: torch.device) -> str:
    """The peak of this process, the device's memory, and what others hold of it."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        total = psutil.virtual_memory().total
        allowed = f", of which a process may take {_amount(limit)}" if 0 < limit < total else ""
        return f"the process had {_amount(peak)} at its peak, this machine has {_amount(total)}{allowed}"
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"tensors had {_amount(peak)} at their peak, the GPU has {_amount(total)}, other uses of it {_amount(others)}"
    )


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
