"""The GPUs of this machine by their numbers in a recipe, `cuda:k`, and how a process of its own gets one of them.

A launcher shows its ranks the GPUs of the training ranks alone, so that the others have no number there. launch.py
therefore notes down which there were for the whole run (`noted`), and the ranks count in that list. Without a note, as
under torchrun, a rank's own view is the list. Only a launcher on the rank's own machine leaves a note: DeepSpeed does
not send it over ssh. No torch at import: launch.py must start at once.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from wfm_ds.errors import RecipeError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NOTE = "WFM_LAUNCH_GPUS"  # no variable of workers: rollout/service.py keeps those of launchers from them
ALL = "all"
CUDA = re.compile(r"cuda(?::(\d+))?")
COUNT = "import torch; print(torch.cuda.device_count())"
COUNT_S = 300.0


def noted(environ: Mapping[str, str]) -> str:
    """The value of `NOTE` for a run that is started with this environment."""
    return environ.get(VISIBLE, ALL)


def names(visible: str) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES: numbers, UUIDs or names of MIG slices."""
    return [name.strip() for name in visible.split(",")] if visible else []


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs that a run may use on this machine, as CUDA_VISIBLE_DEVICES names them; the k-th is cuda:k of a recipe."""

    all: tuple[str, ...]
    of_ranks: frozenset[str]  # the training ranks of this machine compute on these

    def name(self, device: str) -> str | None:
        """The word of CUDA_VISIBLE_DEVICES for this device; None for one that is no GPU. Raises RecipeError for a GPU
        that is not there."""
        found = CUDA.fullmatch(device)
        if found is None:
            return None
        number = int(found[1] or 0)
        if number >= len(self.all):
            raise RecipeError(f"rollout.devices: {device} is not there: {self._range()}{_over_ssh()}")
        return self.all[number]

    def _range(self) -> str:
        if not self.all:
            return "this machine has no GPU for this run"
        last = len(self.all) - 1
        return f"this machine has {len(self.all)} for this run, cuda:0{f' to cuda:{last}' if last else ''}"


def machine_gpus(num_ranks: int) -> Gpus:
    """The GPUs of this run on this machine, `num_ranks` of whose training ranks are here."""
    from wfm_ds.distributed.accelerator import uses_cuda

    own = _listed(os.environ.get(VISIBLE, ALL))
    there = _listed(os.environ[NOTE]) if NOTE in os.environ else own
    return Gpus(there, frozenset(own[:num_ranks] if uses_cuda() else ()))


def for_process(environ: Mapping[str, str], gpu: str) -> dict[str, str]:
    """The environment of a process that has this GPU alone, as its cuda:0."""
    return {**environ, VISIBLE: gpu}


@functools.cache
def _listed(visible: str) -> tuple[str, ...]:
    """The GPUs that a process sees with this value. Asked of another process: one that has asked CUDA once never gets
    another answer. CUDA stops at the first name that it does not know."""
    environ = {name: value for name, value in os.environ.items() if name != VISIBLE}
    if visible != ALL:
        environ[VISIBLE] = visible
    answer = subprocess.run(
        [sys.executable, "-c", COUNT], env=environ, capture_output=True, text=True, timeout=COUNT_S, check=True
    )
    count = int(answer.stdout.split()[-1])
    return tuple(names(visible)[:count]) if visible != ALL else tuple(map(str, range(count)))


def _over_ssh() -> str:
    """Advice where DeepSpeed alone has set what this rank sees."""
    if NOTE in os.environ or "CROSS_RANK" not in os.environ:
        return ""
    return f"; if DeepSpeed started this node over ssh, a line {NOTE}={ALL} in ~/.deepspeed_env tells it of the others"
