"""A run on two nodes that are both this machine. Each node is started by its own command, as on SLURM."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from faults.processes import until
from faults.small_runs import ENDLESS, ROOT, end, prepare_recipe, result
from multi_rank.resuming import train_on_rank
from multi_rank.same_runs import assert_same_runs
from wfm_ds.distributed.accelerator import find_free_port
from wfm_ds.distributed.heartbeat import EXIT_TIMEOUT_S, SILENCE_TIMEOUT_S

WAIT_S = 300.0
END_S = 120.0  # deadline from the death of one node to the end of the other

pytestmark = pytest.mark.long


class Nodes:
    """Two nodes with one rank each, their logs and their exit codes."""

    def __init__(self, folder, *overrides):
        self.folder, self.logs = folder, [folder / f"node_{node}.log" for node in (0, 1)]
        (folder / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
        line = ["--hostfile", str(folder / "hosts"), "--no_ssh", "--master_addr", "127.0.0.1"]
        line += ["--master_port", str(find_free_port())]
        what = ["-m", "wfm_ds.train", *overrides]
        self.processes = []
        for node, log in enumerate(self.logs):
            with log.open("wb") as out:
                command = [sys.executable, "-m", "wfm_ds.launch", *line, "--node_rank", str(node), *what]
                process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            self.processes.append(process)

    def wait_for(self, path):
        until(lambda: path.exists() or any(process.poll() is not None for process in self.processes), WAIT_S)
        assert path.exists(), self.printed()

    def of_node(self, node):
        """Return the processes of a node, with the rank last."""
        command = psutil.Process(self.processes[node].pid)
        return sorted([command, *command.children(recursive=True)], key=lambda process: process.create_time())

    def codes(self, timeout_s=WAIT_S):
        until_s = time.monotonic() + timeout_s
        return [process.wait(max(0.0, until_s - time.monotonic())) for process in self.processes]

    def printed(self):
        return "\n".join(log.read_text(errors="replace") for log in self.logs)


@pytest.fixture
def nodes(tiny_pipelines, tmp_path):
    started = []
    common = [*prepare_recipe(tiny_pipelines("sd3"), tmp_path), f"run.output_dir={tmp_path / 'out'}"]

    def start(*overrides):
        started.append(Nodes(tmp_path, *common, *overrides))
        return started[-1]

    yield start
    for both in started:
        end(both.processes)


def test_two_nodes_train_as_two_ranks_of_one_node(nodes, two_ranks, tiny_pipelines, tmp_path):
    both = nodes("optimizer.eps=1e-4")
    assert both.codes() == [0, 0], both.printed()
    two_ranks.run(
        train_on_rank,
        recipe=str(ROOT / "tests" / "recipes" / "sd3_sft_lora.yaml"),
        overrides=[
            f"model.path={tiny_pipelines('sd3')}",
            f"data.path={tmp_path / 'digits' / 'images'}",
            f"run.output_dir={tmp_path / 'one'}",
            "optimizer.eps=1e-4",
        ],
    )
    assert_same_runs(tmp_path / "one", tmp_path / "out")


def test_a_reward_service_on_one_node_is_refused_on_both(tiny_pipelines, tmp_path):
    words = [str(ROOT / "tests" / "recipes" / "sd3_nft.yaml"), f"model.path={tiny_pipelines('sd3')}"]
    both = Nodes(tmp_path, *words, f"run.output_dir={tmp_path / 'out'}")
    try:
        assert both.codes() == [2, 2], both.printed()
    finally:
        end(both.processes)
    assert both.printed().count("error: reward.spawn: true: the reward service cannot be reached by 1 of 2 ranks") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dead", [0, 1])
def test_after_the_death_of_a_node_the_other_one_ends_and_names_it(nodes, tmp_path, dead):
    both = nodes(*ENDLESS)
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    parts = both.of_node(dead)
    for part in parts:
        part.kill()
    assert both.processes[1 - dead].wait(END_S) == 1, both.printed()
    said = both.logs[1 - dead].read_text()
    assert f"the run ends: rank {dead} (" in said
    assert "gone: its connection closed" in said
    if dead == 1:  # rank 0 writes result.json, so it must be alive
        assert f"process {parts[-1].pid} on" in result(tmp_path)["message"]
        assert result(tmp_path)["status"] == "failed"


def test_sigterm_to_one_node_saves_and_ends_both(nodes, tmp_path, monkeypatch):
    monkeypatch.setenv("WFM_PREEMPTED_CODE", "75")
    both = nodes(*ENDLESS)
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    for part in both.of_node(1):  # as SLURM does
        part.terminate()
    assert both.codes() == [75, 75], both.printed()
    assert result(tmp_path)["status"] == "preempted"
    step = result(tmp_path)["step"]
    assert (tmp_path / "out" / "checkpoints" / f"step_{step}" / "COMPLETE").is_file()


# A sitecustomize module. Opening the image blocks on a pipe, as on a file system that no longer responds.
STALLED = """
import os, sys
def hook(event, arguments):
    if event == "open" and arguments[0] == os.environ["STALLED_IMAGE"] and os.path.exists(os.environ["STALLED_PIPE"]):
        os.open(os.environ["STALLED_PIPE"], os.O_RDONLY)
sys.addaudithook(hook)
"""


def test_a_hanging_rank_is_named_after_the_timeout_of_the_recipe(nodes, tmp_path, monkeypatch):
    """The rank blocks on reading a file. Its process is alive and still sends heartbeats."""
    (tmp_path / "stalled").mkdir()
    (tmp_path / "stalled" / "sitecustomize.py").write_text(STALLED)
    image = min((tmp_path / "digits" / "images").glob("*.png"))
    monkeypatch.setenv("STALLED_IMAGE", str(image))
    monkeypatch.setenv("STALLED_PIPE", str(tmp_path / "pipe"))
    paths = [str(tmp_path / "stalled"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    both = nodes(*ENDLESS, "engine.timeout_minutes=1.5", "validation.holdout=0")
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    os.mkfifo(tmp_path / "pipe")
    assert both.codes() == [1, 1], both.printed()
    (fault,) = set(re.findall(r"the run ends: (rank [01] .*)", both.printed()))
    assert re.match(r"rank [01] \(process \d+ on \S+\) is stuck: no progress for \d+ s at a reduction of .*", fault)
    assert 90 <= int(re.search(r"no progress for (\d+) s", fault)[1]) < 250
    assert fault.endswith("; the other ranks wait for it")
    assert "most recent call first" in both.printed()


def test_a_stopped_rank_is_named(nodes, tmp_path):
    both = nodes(*ENDLESS)
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    rank = both.of_node(1)[-1]
    os.kill(rank.pid, signal.SIGSTOP)
    assert both.processes[0].wait(SILENCE_TIMEOUT_S + EXIT_TIMEOUT_S + END_S) == 1, both.printed()
    said = both.logs[0].read_text()
    assert f"the run ends: rank 1 (process {rank.pid} on" in said
    assert "gone: no sign of life for" in said
