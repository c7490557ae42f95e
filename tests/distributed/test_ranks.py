"""The rank of a process in the environment variables of every launcher."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from each_case import check_each
from wfm_ds.distributed.ranks import LaunchedRank, find_launched_rank, first_slurm_host, read_rank
from wfm_ds.distributed.world import require_gpus
from wfm_ds.errors import UserError

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 60
RENDEZVOUS = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
# The third of four ranks, on the second of two nodes.
RANK_2 = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
TORCHRUN = {**{**RANK_2, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}, **RENDEZVOUS}
DEEPSPEED = {**RANK_2, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2", **RENDEZVOUS}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
BATCH = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **{**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    **{"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "node[1-2]"},
    **{"SLURM_GTIDS": "2,3"},
    **{"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9"},
}
NODE_TASK = SRUN | {  # srun --ntasks-per-node=1, to start a launcher on each node
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_GTIDS": "1"}
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node-a"},
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", **RENDEZVOUS}
PALS = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2", **RENDEZVOUS}
INTERACTIVE = {**BATCH, "SLURM_STEP_ID": "4294967290"}  # salloc with LaunchParameters=use_interactive_step


@check_each(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (DEEPSPEED, "deepspeed"),
        (SRUN, "srun"),
        (OPEN_MPI, "mpirun"),
        (HYDRA, "mpiexec"),
        (PALS, "mpiexec"),
        ({**RANK_2, "LOCAL_WORLD_SIZE": "2", **RENDEZVOUS}, "RANK"),
        # Without the variables of a step, and with those of srun --mpi=pmi2.
        ({**BATCH, **{k: SRUN[k] for k in ("SLURM_PROCID", "SLURM_NODEID", "SLURM_STEP_NODELIST")}}, "srun"),
        ({k: v for k, v in SRUN.items() if "TASKS_PER_NODE" not in k} | {"SLURM_NTASKS_PER_NODE": "2"}, "srun"),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, "srun"),
        ({**SRUN, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "", "MASTER_ADDR": "node1"}, "srun"),
        # One launcher inside another.
        ({**NODE_TASK, **TORCHRUN}, "torchrun"),
        ({**NODE_TASK, **DEEPSPEED}, "deepspeed"),
        ({**NODE_TASK, **OPEN_MPI}, "mpirun"),
        ({**NODE_TASK, **HYDRA}, "mpiexec"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **DEEPSPEED}, "deepspeed"),
        ({**BATCH, **DEEPSPEED}, "deepspeed"),
        ({**INTERACTIVE, "SLURM_STEP_NUM_TASKS": "4", **TORCHRUN}, "torchrun"),
    ],
)
def test_all_launchers_give_the_same_rank(environ, launcher):
    launched = find_launched_rank(environ)
    found = (launched.rank, launched.size, launched.local_rank, launched.local_size, launched.launcher)
    assert found == (2, 4, 0, 2, launcher)
    assert launched.master_addr == ("node1" if launcher == "srun" else "node-a")
    assert read_rank(environ) == 2
    again = find_launched_rank({**environ, **launched.variables()})  # as after World.join
    assert again.variables() == launched.variables()


@check_each(
    "environ",
    [
        {},
        {"RANK": "", "LOCAL_RANK": "0", "PMI_SIZE": ""},
        SALLOC,
        BATCH,
        INTERACTIVE,
        {**INTERACTIVE, "SLURM_STEP_NUM_TASKS": "4"},
        {**SALLOC, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_shell_and_a_single_process_have_no_launcher(environ):
    assert find_launched_rank(environ) is None


def test_pods_of_a_pytorchjob():
    """One process per pod has no local variables. With several processes, torchrun sets them."""
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    launched = find_launched_rank({**pod, "PET_NPROC_PER_NODE": "auto"})
    assert launched == LaunchedRank(1, 2, 0, 1, "job-master-0", 23456, "RANK")
    several = {**pod, "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16"}
    with pytest.raises(
        UserError, match=r"^PET_NPROC_PER_NODE=8 is set without LOCAL_RANK: start torchrun on each node"
    ):
        find_launched_rank(several)
    inside = {**several, **TORCHRUN, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert find_launched_rank(inside).launcher == "torchrun"


@check_each(
    ("environ", "message"),
    [
        ({**SRUN, "RANK": "1"}, "RANK=1 contradicts srun, which started this process as rank 2 of 4"),
        ({**SRUN, "RANK": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 contradicts srun"),
        ({**SRUN, "RANK": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 contradicts srun"),
        ({**OPEN_MPI, "RANK": "0"}, "RANK=0 contradicts mpirun"),
        ({**DEEPSPEED, "WORLD_SIZE": "2"}, r"rank 2 of 2 .* \(variables of deepspeed\) is impossible"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "with local rank 2 of 2 .* is impossible"),
        ({**RANK_2, "LOCAL_SIZE": "4", **RENDEZVOUS}, "rank 2 of 4 with local rank 0 of 4 .* is impossible"),
        ({"RANK": "1"}, "RANK=1 is set without WORLD_SIZE"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first: expected a number"),
        ({**RANK_2, **RENDEZVOUS}, "LOCAL_RANK=0 is set without LOCAL_WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, "LOCAL_SIZE=2 is set without LOCAL_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "set MASTER_ADDR on all of them"),
        ({**OPEN_MPI, "MASTER_ADDR": ""}, "mpirun started ranks on several nodes: set MASTER_ADDR"),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, "PMI_SIZE=4 is set without MPI_LOCALRANKID"),
        ({**SRUN, "SLURM_PROCID": ""}, "SLURM_STEP_NUM_TASKS=4 is set without SLURM_PROCID"),
        ({**SRUN, "SLURM_PROCID": "1"}, "SLURM_PROCID=1 is task 0 of node 1.*--distribution=block"),
        ({**SRUN, "SLURM_GTIDS": "2,4"}, "SLURM_PROCID=2 is task 0 of node 1, but the tasks of a node are not consec"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "SLURM_STEP_NUM_TASKS=4 and the tasks per node 2,2,2"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x2"}, r"SLURM_STEP_TASKS_PER_NODE=2x2: expected counts such as"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environ, message):
    with pytest.raises(UserError, match=message) as refused:
        find_launched_rank(environ)
    assert "\n" not in str(refused.value)
    assert read_rank(environ) == 0


def test_nodes_with_different_numbers_of_tasks():
    last = {
        "SLURM_GTIDS": "4",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
        "SLURM_PROCID": "4",
    }
    launched = find_launched_rank({**SRUN, **last, "SLURM_NODEID": "2"})
    assert (launched.rank, launched.size, launched.local_rank, launched.local_size) == (4, 5, 0, 1)


def test_address_and_port_of_rank_0():
    one_node = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    one_node["SLURM_GTIDS"] = "0,1"
    first = find_launched_rank({**one_node, "SLURM_PROCID": "0"})
    assert first.master_addr == "127.0.0.1"
    ports = {find_launched_rank({**SRUN, "SLURM_STEP_ID": str(step)}).master_port for step in range(3)}
    assert len(ports) == 3  # steps that share a node choose different ports
    assert all(15000 <= port < 25000 for port in ports)
    in_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}  # mpirun in a batch script: only ranks of other nodes have it
    first_port = find_launched_rank({**OPEN_MPI, "SLURM_JOB_ID": "7"}).master_port
    assert find_launched_rank({**OPEN_MPI, **in_step}).master_port == first_port
    no_list = {k: v for k, v in SRUN.items() if not k.endswith("NODELIST")}
    assert find_launched_rank(no_list).master_addr == "10.0.0.9"
    assert find_launched_rank({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}).master_port == 1234


@check_each(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12],gpu[1-3]", "gpu12"),
        ("rack[0-1]n[3,5].site", "rack0n3.site"),
        ("a-1,b-2", "a-1"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_slurm_host(nodes) == first


def test_a_rank_without_a_gpu_of_its_own_is_refused():
    launched = find_launched_rank(SRUN)
    require_gpus(launched, 2)
    with pytest.raises(UserError, match=r"^rank 2 sees 1 GPUs, but its node has 2 ranks: .*not --gpus-per-task\)$"):
        require_gpus(launched, 1)


def test_contradicting_variables_end_training_with_one_error(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_", "LOCAL_"))}
    recipe = [str(ROOT / "tests" / "recipes" / "sd3_nft.yaml"), f"run.output_dir={tmp_path / 'out'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "wfm_ds.train", *recipe],
        **{"env": {**clean, **SRUN, "RANK": "1"}, "cwd": ROOT, "timeout": WAIT_S},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, list(tmp_path.iterdir())) == (2, [])
    assert ended.stderr.startswith("error: RANK=1 contradicts srun")
    assert ended.stderr.count("\n") == 1


def test_only_one_module_reads_the_variables_of_launchers():
    """Assignments by name, such as `"RANK": ...`, are allowed."""
    read = re.compile(
        r"""(?:environ|getenv)(?:\.get)?[\[(]["'](RANK|WORLD_SIZE|LOCAL_\w+|MASTER_\w+|CROSS_\w+|SLURM_\w+|OMPI_\w+|PMI_\w+)["']"""
    )
    sources = [
        path for folder in ("wfm_ds", "benchmarks", "reward", "kernels") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 100
    assert [str(path) for path in sources if read.search(path.read_text()) and path.name != "ranks.py"] == []
