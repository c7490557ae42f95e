"""Explains a failed memory allocation with the phase, the memory in use, and the recipe keys to change.

The error is a UserError, because the user can fix it with recipe keys. No checkpoint is saved after the error, because
the device has no free memory. The previous checkpoint remains usable.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

from wfm_ds.errors import RunError, UserError, is_out_of_memory
from wfm_ds.monitoring.meters import GIB

REQUEST_PATTERN = re.compile(r"ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
UNIT_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


class OutOfMemory(UserError):
    """The device of this rank is out of memory."""


@contextmanager
def explain_out_of_memory(
    device: torch.device, advice: Callable[[str], Sequence[str]], phase: Callable[[], str | None]
) -> Iterator[None]:
    """Convert failed memory allocations in the block to OutOfMemory errors with an explanation.

    phase: function that returns the phase in which the error occurred, or None.
    advice: function that returns the recipe keys to change for a phase, best first. The phase is "" if unknown.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RunError) or not is_out_of_memory(error):  # a RunError may report another process
            raise
        name = phase() or ""
        raise OutOfMemory(out_of_memory_message(error, device, name, advice(name))) from error


def out_of_memory_message(error: BaseException, device: torch.device, phase: str, advice: Sequence[str]) -> str:
    """Return `out of memory on cuda:0 in phase train: requested 2.0 GiB more, ...; change KEY, or KEY`."""
    match = REQUEST_PATTERN.search(str(error))
    request = f"requested {_format_bytes(float(match[1]) * UNIT_BYTES[match[2]])} more, " if match else ""
    in_phase = f" in phase {phase}" if phase else ""
    change = f"; change {', or '.join(advice)}" if advice else ""
    return f"out of memory on {device}{in_phase}: {request}{describe_memory_usage(device)}{change}"


def describe_memory_usage(device: torch.device) -> str:
    """Return a text with this process's peak memory and the memory of the device.

    On a GPU, the text includes the memory that other processes use.
    """
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        total = psutil.virtual_memory().total
        allowed = f" (limit per process: {_format_bytes(limit)})" if 0 < limit < total else ""
        return f"the peak of the process was {_format_bytes(peak)}, this machine has {_format_bytes(total)}{allowed}"
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"the peak of tensors was {_format_bytes(peak)}, the GPU has {_format_bytes(total)}, others use "
        f"{_format_bytes(others)} of it"
    )


def _format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
