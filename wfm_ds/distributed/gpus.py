"""Map `cuda:k` in a recipe to a GPU of this machine, and restrict a process to one GPU.

`cuda:k` is the k-th GPU of the run, counted from 0. launch.py stores these GPUs in the environment variable
WFM_LAUNCH_GPUS. Without this variable, `cuda:k` is the k-th GPU that the rank sees.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from wfm_ds.distributed.ranks import find_launched_rank
from wfm_ds.errors import RecipeError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCH_GPUS = "WFM_LAUNCH_GPUS"  # removed from rollout workers, like all variables of the launcher
ALL_GPUS = "all"
CUDA_DEVICE = re.compile(r"cuda(?::(\d+))?")
COUNT_SCRIPT = "import torch; print(torch.cuda.device_count())"
COUNT_TIMEOUT_S = 300.0


def launch_gpus_value(environ: Mapping[str, str]) -> str:
    return environ.get(VISIBLE_DEVICES, ALL_GPUS)


def split_visible_devices(visible: str) -> list[str]:
    """Split CUDA_VISIBLE_DEVICES into its entries: numbers, UUIDs or names of MIG slices."""
    return [name.strip() for name in visible.split(",")] if visible else []


@dataclass(frozen=True, slots=True)
class MachineGpus:
    """The GPUs here that the run may use, as entries of CUDA_VISIBLE_DEVICES. The device `cuda:k` is `all[k]`."""

    all: tuple[str, ...]
    training_gpus: frozenset[str]  # used by the training ranks of this machine

    def visible_name(self, device: str, key: str) -> str | None:
        """Return the CUDA_VISIBLE_DEVICES entry of a device such as `cuda:1`, or None if the device is not a GPU.

        key: recipe key of the device, for error messages. Raises RecipeError if the GPU does not exist.
        """
        match = CUDA_DEVICE.fullmatch(device)
        if match is None:
            return None
        number = int(match[1] or 0)
        if number >= len(self.all):
            last = f" to cuda:{len(self.all) - 1}" if len(self.all) > 1 else ""
            gpus = f"the run's GPUs on this machine are cuda:0{last}"
            problem = gpus if self.all else "this machine has no GPU for this run"
            raise RecipeError(f"{key}: {device} does not exist: {problem}{_ssh_advice()}")
        return self.all[number]


def find_machine_gpus(num_ranks: int) -> MachineGpus:
    """Return the GPUs of this run on this machine. num_ranks: number of training ranks on this machine."""
    from wfm_ds.distributed.accelerator import uses_cuda

    visible = _list_gpus(os.environ.get(VISIBLE_DEVICES, ALL_GPUS))
    all_gpus = _list_gpus(os.environ[LAUNCH_GPUS]) if LAUNCH_GPUS in os.environ else visible
    return MachineGpus(all_gpus, frozenset(visible[:num_ranks] if uses_cuda() else ()))


def run_gpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process in which `cuda:k` is the k-th GPU of the run on this machine."""
    run_gpus = environ.get(LAUNCH_GPUS)
    if run_gpus is None:
        return dict(environ)
    others = {name: value for name, value in environ.items() if name != VISIBLE_DEVICES}
    return others if run_gpus == ALL_GPUS else {**others, VISIBLE_DEVICES: run_gpus}


@functools.cache
def _list_gpus(visible: str) -> tuple[str, ...]:
    """Return the GPUs that a process with this CUDA_VISIBLE_DEVICES sees, as entries of the variable.

    A subprocess counts them, because CUDA reads the variable only once per process. CUDA ignores an unknown entry and
    all entries after it.
    """
    environ = {name: value for name, value in os.environ.items() if name != VISIBLE_DEVICES}
    if visible != ALL_GPUS:
        environ[VISIBLE_DEVICES] = visible
    result = subprocess.run(
        [sys.executable, "-c", COUNT_SCRIPT],
        env=environ,
        capture_output=True,
        text=True,
        timeout=COUNT_TIMEOUT_S,
        check=True,
    )
    count = int(result.stdout.split()[-1])
    return tuple(split_visible_devices(visible)[:count]) if visible != ALL_GPUS else tuple(map(str, range(count)))


def _ssh_advice() -> str:
    launched = find_launched_rank(os.environ)
    if LAUNCH_GPUS in os.environ or launched is None or launched.launcher != "deepspeed":
        return ""
    return (
        f"; if DeepSpeed started this node over ssh, add {LAUNCH_GPUS}={ALL_GPUS} to ~/.deepspeed_env to use its "
        "other GPUs"
    )
