"""Runs of two ranks on this machine, started by torchrun, mpirun, variables of srun and PyTorchJob, and pdsh."""

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from faults.processes import until
from faults.small_runs import ENDLESS, ROOT, end, prepare_recipe, result
from multi_rank.same_runs import exported, records
from wfm_ds.cli.main import main
from wfm_ds.distributed.accelerator import find_free_port
from wfm_ds.distributed.ranks import remove_rank_variables

WAIT_S = 300.0
HOSTS = ("127.0.0.1", "127.0.0.2")
BIN = Path(sys.executable).parent


def clean_environment(**variables):
    return {**remove_rank_variables(os.environ), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}


@pytest.fixture
def arguments(tiny_pipelines, tmp_path):
    """`arguments(NAME, *overrides)` returns the arguments of wfm_ds.train for a run in the folder NAME."""
    recipe = prepare_recipe(tiny_pipelines("sd3"), tmp_path)
    return lambda name, *overrides: [*recipe, f"run.output_dir={tmp_path / name}", *overrides]


@contextlib.contextmanager
def started(commands, environments, folder):
    """Run the commands as processes. Yield (processes, function that returns their output)."""
    logs = [folder / f"process_{i}.log" for i in range(len(commands))]
    processes = []
    try:
        for command, env, log in zip(commands, environments, logs, strict=True):
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
        yield processes, lambda: "\n".join(log.read_text(errors="replace") for log in logs)
    finally:
        end(processes)


def train(commands, environments, folder):
    with started(commands, environments, folder) as (processes, printed):
        codes = [process.wait(WAIT_S) for process in processes]
        assert codes == [0] * len(codes), printed()


@pytest.fixture(scope="module")
def one_node(tiny_pipelines, tmp_path_factory):
    """Train on two ranks of one node. Returns (arguments of wfm_ds.train without the output folder, output folder)."""
    folder = tmp_path_factory.mktemp("one_node")
    recipe = prepare_recipe(tiny_pipelines("sd3"), folder)
    module = [sys.executable, "-m", "wfm_ds.launch", "--num_gpus", "2", "-m", "wfm_ds.train"]
    train([[*module, *recipe, f"run.output_dir={folder / 'out'}"]], [clean_environment()], folder)
    return recipe, folder / "out"


def launch_two_ranks(launcher, arguments):
    """Return the commands with which the launcher starts two ranks, and their environments."""
    command, port = [sys.executable, "-m", "wfm_ds.train", *arguments], str(find_free_port())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr", HOSTS[0], "--master-port", port]
    if launcher == "torchrun, one node":
        return [[*torchrun, "--nproc-per-node", "2", *command[1:]]], [clean_environment()]
    if launcher == "mpirun":
        return [["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", *command]], [clean_environment()]
    if launcher == "PyTorchJob":  # two pods
        pod = {"WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": port, "PET_NPROC_PER_NODE": "auto"}
        return [command] * 2, [clean_environment(**pod, RANK=str(i)) for i in (0, 1)]
    allocation = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    allocation |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_LOCALID": "0"}
    tasks = [clean_environment(**allocation, SLURM_PROCID=str(i), SLURM_NODEID=str(i)) for i in (0, 1)]
    if launcher == "srun":
        return [command] * 2, tasks
    torchrun += ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank"]  # inside srun, with one task per node
    return [[*torchrun, node, *command[1:]] for node in ("0", "1")], tasks


@pytest.mark.parametrize("launcher", ["torchrun, one node", "torchrun, two nodes", "srun", "PyTorchJob", "mpirun"])
@pytest.mark.ci_cases("srun", "mpirun")
def test_two_ranks_of_each_launcher_equal_one_node_bit_for_bit(launcher, one_node, tmp_path):
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs the Debian package openmpi-bin")
    recipe, expected = one_node
    train(*launch_two_ranks(launcher, [*recipe, f"run.output_dir={tmp_path / 'out'}"]), tmp_path)
    assert sorted(log.name for log in (tmp_path / "out" / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert records(tmp_path / "out") == records(expected)
    tensors, others = exported(expected), exported(tmp_path / "out")
    assert tensors
    assert others.keys() == tensors.keys()
    assert all(torch.equal(others[key], tensor) for key, tensor in tensors.items())


@pytest.fixture
def ssh(tmp_path):
    """Start an ssh server on both loopback addresses. Returns a folder to put on PATH, whose `ssh` uses this server."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("pdsh") is None:
        pytest.skip("needs the Debian packages pdsh and openssh-server")
    folder = tmp_path / "ssh"
    (folder / "bin").mkdir(parents=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root needs it
    port = find_free_port()
    server = {
        **{"Port": port, "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub", "PidFile": "none"},
        **{"UsePAM": "no", "StrictModes": "no", "PasswordAuthentication": "no", "PermitRootLogin": "yes"},
    }
    lines = [f"{key} {value}" for key, value in server.items()] + [f"ListenAddress {host}" for host in HOSTS]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    client = {
        **{"Port": port, "IdentityFile": folder / "user", "User": getpass.getuser(), "LogLevel": "ERROR"},
        **{"StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "IdentitiesOnly": "yes"},
    }
    (folder / "config").write_text("Host *\n" + "".join(f"  {key} {value}\n" for key, value in client.items()))
    script = f'#!/bin/bash\nexec {shutil.which("ssh")} -F {folder / "config"} "$@"\n'
    (folder / "bin" / "ssh").write_text(script)
    (folder / "bin" / "ssh").chmod(0o755)
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    try:
        until(lambda: all(can_connect(host, port) for host in HOSTS))
        yield folder / "bin"
    finally:
        process.kill()
        process.wait()


def can_connect(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@pytest.fixture
def pdsh_run(ssh, arguments, tmp_path, monkeypatch):
    """Start the script of `wfm launch --pdsh` on both addresses. Call it with overrides; use it as a context."""

    @contextlib.contextmanager
    def start(*overrides):
        monkeypatch.chdir(tmp_path)
        recipe, *words = arguments("out", *overrides)
        assert main(["launch", recipe, *words, "--pdsh", ",".join(HOSTS), "--gpus", "1", "--name", "nodes"]) == 0
        settings = ("HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE", "DS_ACCELERATOR=cpu")
        (tmp_path / ".deepspeed_env").write_text("\n".join(settings) + "\n")
        env = clean_environment(PATH=f"{ssh}:{BIN}:{os.environ['PATH']}")
        with started([["bash", str(tmp_path / "nodes.pdsh.sh")]], [env], tmp_path) as ((process,), printed):
            try:
                yield process, printed
            finally:
                for rank in find_processes("wfm_ds.train", str(tmp_path / "out")):
                    rank.kill()

    return start


def find_processes(*words):
    """Return the Python processes whose command line contains all words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and Path(line[0]).name.startswith("python") and all(word in " ".join(line) for word in words):
                found.append(process)
    return found


def wait_for_checkpoint(tmp_path, process, printed):
    marker = tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE"
    until(lambda: marker.exists() or process.poll() is not None, WAIT_S)
    assert process.poll() is None, printed()


def test_sigterm_saves_a_run_that_pdsh_started(pdsh_run, tmp_path):
    with pdsh_run(*ENDLESS) as (process, printed):
        wait_for_checkpoint(tmp_path, process, printed)
        ranks = find_processes("wfm_ds.train", "--local_rank=0", str(tmp_path / "out"))
        assert sorted(rank.environ()["RANK"] for rank in ranks) == ["0", "1"]
        assert {rank.environ()["CROSS_SIZE"] for rank in ranks} == {"2"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, printed()
    assert result(tmp_path)["status"] == "preempted"
    assert (tmp_path / "out" / "checkpoints" / f"step_{result(tmp_path)['step']}" / "COMPLETE").is_file()
    assert not find_processes("deepspeed.launcher.launch", str(tmp_path / "out"))


def test_a_dead_node_ends_a_run_that_pdsh_started(pdsh_run, tmp_path):
    with pdsh_run(*ENDLESS) as (process, printed):
        wait_for_checkpoint(tmp_path, process, printed)
        launchers = find_processes("deepspeed.launcher.launch", "--node_rank=1", str(tmp_path / "out"))
        (rank,) = [
            child for launcher in launchers for child in launcher.children() if "wfm_ds.train" in child.cmdline()
        ]
        for part in [*launchers, rank]:  # the whole node
            part.kill()
        assert process.wait(WAIT_S) == 255, printed()  # of ssh, whose command was killed
        assert re.search(
            rf"the run ends: rank 1 \(process {rank.pid} on \S+\) is gone: its connection closed", printed()
        )
    assert result(tmp_path)["status"] == "failed"
    assert not find_processes("wfm_ds.train", str(tmp_path / "out"))
