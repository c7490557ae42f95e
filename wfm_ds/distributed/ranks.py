"""Find the rank of this process in the environment variables of its launcher. docs/multi-node.md lists these variables.

If one launcher runs inside another, the variables of the inner launcher are used. This module does not import torch.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from wfm_ds.errors import UserError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # the default of torchrun and DeepSpeed's launcher
FIRST_JOB_PORT, NUM_JOB_PORTS = 15000, 10000  # below the ports that Linux gives to clients
INTERACTIVE_STEP = "4294967290"  # SLURM_STEP_ID of the shell that salloc starts on a compute node
ADVICE = "see docs/multi-node.md"
# RANK together with one of these variables identifies a launcher.
LAUNCHER_MARKS = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_RANK": "deepspeed"}
# Set by launchers for their ranks.
RANK_VARIABLES = re.compile(
    r"RANK|(LOCAL|GROUP|ROLE|CROSS)_.*|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|WFM_(LAUNCH|STATUS)_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|STEP_.*)|(OMPI|PMI|PMIX)_.*|MPI_LOCAL.*"
)


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """Position of this process among the ranks, consecutive on each node, and the address at which they meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    master_addr: str
    master_port: int
    launcher: str

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which torch and DeepSpeed read this position."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_SIZE": str(self.local_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class _Position(NamedTuple):
    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


OMPI = "OMPI_COMM_WORLD"  # Open MPI
MPI_VARIABLES = (  # of rank, size, local rank and local size; launcher
    ((f"{OMPI}_RANK", f"{OMPI}_SIZE", f"{OMPI}_LOCAL_RANK", f"{OMPI}_LOCAL_SIZE"), "mpirun"),
    (("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "mpiexec"),  # Hydra: MPICH, Intel MPI
    (("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), "mpiexec"),  # Cray PALS
)


def find_launched_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank that a launcher gave to this process, if any. Raises UserError for inconsistent variables."""
    environ = {name: value for name, value in environ.items() if value}
    launcher = next((name for mark, name in LAUNCHER_MARKS.items() if mark in environ), None)
    is_inner = "RANK" in environ and launcher is not None
    position = None if is_inner else _find_mpi_task(environ) or _find_srun_task(environ)
    if position is not None:
        _require_equal_variables(environ, position)
    elif "RANK" in environ:
        position = _read_rank_variables(environ, launcher or "RANK")
    else:
        return None
    _require_consistent(position)
    address, port = _find_master(environ, position)
    return LaunchedRank(*position[:4], address, port, position.launcher)


def read_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process. Returns 0 without a launcher, or if the launcher's variables are invalid."""
    try:
        launched = find_launched_rank(environ)
    except UserError:
        return 0
    return 0 if launched is None else launched.rank


def remove_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that launchers set for a rank, for child processes that are not ranks."""
    return {name: value for name, value in environ.items() if not RANK_VARIABLES.fullmatch(name)}


def _read_number(environ: Mapping[str, str], variable: str) -> int:
    text = environ[variable]
    if not text.isdecimal():
        raise UserError(f"{variable}={text}: expected a number ({ADVICE})")
    return int(text)


def _read_rank_variables(environ: Mapping[str, str], launcher: str) -> _Position:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, and LOCAL_SIZE or LOCAL_WORLD_SIZE.

    Without the local variables, this process is the only rank on its node, as in a pod of a PyTorchJob.
    """
    rank = _read_number(environ, "RANK")
    if "WORLD_SIZE" not in environ:
        raise UserError(f"RANK={rank} is set without WORLD_SIZE: set it to the number of ranks ({ADVICE})")
    size = _read_number(environ, "WORLD_SIZE")
    size_name = "LOCAL_SIZE" if "LOCAL_SIZE" in environ else "LOCAL_WORLD_SIZE"
    local_size = _read_number(environ, size_name) if size_name in environ else 1
    if "LOCAL_RANK" in environ:
        if size_name not in environ and size > 1:
            raise UserError(
                f"LOCAL_RANK={environ['LOCAL_RANK']} is set without LOCAL_WORLD_SIZE: set it to the number of ranks on "
                f"this node ({ADVICE})"
            )
        return _Position(rank, size, _read_number(environ, "LOCAL_RANK"), local_size, launcher)
    processes = environ.get("PET_NPROC_PER_NODE", "1")
    if local_size > 1 or (processes.isdecimal() and int(processes) > 1):
        name, value = (size_name, local_size) if local_size > 1 else ("PET_NPROC_PER_NODE", processes)
        raise UserError(f"{name}={value} is set without LOCAL_RANK: start torchrun on each node, not python ({ADVICE})")
    return _Position(rank, size, 0, 1, launcher)


def _find_mpi_task(environ: Mapping[str, str]) -> _Position | None:
    for names, launcher in MPI_VARIABLES:
        if all(name in environ for name in names) and environ[names[1]] != "1":
            rank, size, local_rank, local_size = (_read_number(environ, name) for name in names)
            return _Position(rank, size, local_rank, local_size, launcher)
    for names, _ in MPI_VARIABLES:
        is_srun = "SLURM_STEP_NUM_TASKS" in environ  # srun --mpi=pmi2 sets PMI_RANK too
        if names[0] in environ and environ.get(names[1], "1") != "1" and not is_srun:
            missing = next(name for name in names if name not in environ)
            raise UserError(
                f"{names[1]}={environ[names[1]]} is set without {missing}: set RANK, WORLD_SIZE, LOCAL_RANK and "
                f"LOCAL_WORLD_SIZE for each process ({ADVICE})"
            )
    return None


def _find_srun_task(environ: Mapping[str, str]) -> _Position | None:
    """Return the rank of this process if srun started it as one of several tasks of a step, else None.

    SLURM_STEP_NUM_TASKS is used instead of SLURM_NTASKS, which shells of salloc and batch scripts have too.
    """
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
    is_step = any(name in environ for name in steps) and environ.get("SLURM_STEP_ID") != INTERACTIVE_STEP
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if not is_step or environ.get(size_name, "1") == "1":
        return None
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if name not in environ:
            raise UserError(
                f"{size_name}={environ[size_name]} is set without {name}: start the processes with srun, or unset the "
                f"SLURM_STEP variables ({ADVICE})"
            )
    rank, size = _read_number(environ, "SLURM_PROCID"), _read_number(environ, size_name)
    local_rank, counts = _read_number(environ, "SLURM_LOCALID"), _tasks_per_node(environ, size)
    node = _read_number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else rank // counts[0]
    if sum(counts) != size or node >= len(counts):
        raise UserError(
            f"{size_name}={size} and the tasks per node {','.join(map(str, counts))} contradict each other: start one "
            f"task per GPU with srun ({ADVICE})"
        )
    first = sum(counts[:node])
    consecutive = ",".join(str(task) for task in range(first, first + counts[node]))
    if first + local_rank != rank or environ.get("SLURM_GTIDS", consecutive) != consecutive:
        raise UserError(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}, but the tasks of a node are not consecutive: "
            "start srun with --distribution=block"
        )
    return _Position(rank, size, local_rank, counts[node], "srun")


def _tasks_per_node(environ: Mapping[str, str], size: int) -> list[int]:
    """Return the number of tasks of each node, such as [2, 2, 1] for SLURM_STEP_TASKS_PER_NODE=2(x2),1."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            matches = [re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part) for part in environ[name].split(",")]
            runs = [[int(match[1])] * int(match[2] or 1) for match in matches if match is not None]
            if len(runs) < len(matches):
                raise UserError(f"{name}={environ[name]}: expected counts such as 8(x2),4 ({ADVICE})")
            return list(itertools.chain.from_iterable(runs))
    per_node = _read_number(environ, "SLURM_NTASKS_PER_NODE") if "SLURM_NTASKS_PER_NODE" in environ else 0
    if not per_node or size % per_node:
        raise UserError(
            f"the SLURM variables of {size} tasks do not contain the tasks per node: start srun with --ntasks-per-node"
        )
    return [per_node] * (size // per_node)


def _require_equal_variables(environ: Mapping[str, str], task: _Position) -> None:
    names = {"RANK": task.rank, "WORLD_SIZE": task.size, "LOCAL_RANK": task.local_rank}
    names |= {"LOCAL_SIZE": task.local_size, "LOCAL_WORLD_SIZE": task.local_size}
    for name, value in names.items() if "RANK" in environ else ():
        if name in environ and _read_number(environ, name) != value:
            raise UserError(
                f"{name}={environ[name]} contradicts {task.launcher}, which started this process as rank {task.rank} "
                f"of {task.size} (local rank {task.local_rank} of {task.local_size}): unset {name} ({ADVICE})"
            )


def _require_consistent(position: _Position) -> None:
    rank, size, local_rank, local_size, launcher = position
    first = rank - local_rank  # the first rank of this node
    if rank < size and local_rank < local_size and 0 <= first <= size - local_size:
        return
    raise UserError(
        f"rank {rank} of {size} with local rank {local_rank} of {local_size} (variables of {launcher}) is impossible: "
        f"ranks start at 0, and the ranks of a node are consecutive ({ADVICE})"
    )


def _find_master(environ: Mapping[str, str], position: _Position) -> tuple[str, int]:
    port = _read_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _job_port(environ, position.launcher)
    hosts = next((environ[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if n in environ), "")
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port
    if position.local_size == position.size:
        return LOOPBACK, port
    if position.launcher == "srun" and (hosts or "SLURM_LAUNCH_NODE_IPADDR" in environ):
        # SLURM_LAUNCH_NODE_IPADDR is the machine on which srun was called, often the first node.
        return first_slurm_host(hosts) if hosts else environ["SLURM_LAUNCH_NODE_IPADDR"], port
    raise UserError(
        f"{position.launcher} started ranks on several nodes: set MASTER_ADDR on all of them to an address of the "
        f"node of rank 0 ({ADVICE})"
    )


def _job_port(environ: Mapping[str, str], launcher: str) -> int:
    """Return a port that is derived from the job id, so that two jobs on one node rarely choose the same port."""
    names = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"]
    if launcher == "srun":  # not for mpirun, which starts the ranks of its own node outside of a step
        names.append("SLURM_STEP_ID")
    job = ".".join(environ[name] for name in names if name in environ)
    return FIRST_JOB_PORT + zlib.crc32(job.encode()) % NUM_JOB_PORTS if job else DEFAULT_PORT


def first_slurm_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu07` for `gpu[07-09,12],login1`."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0]) if match else nodes
