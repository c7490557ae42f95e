"""A run of two machines, both this one: a hostfile of two nodes, each started by its own command, as SLURM would."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from multi_rank.resuming import train_on_rank
from multi_rank.same_runs import assert_same_runs
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.distributed.heartbeat import EXIT_TIMEOUT_S, SILENCE_TIMEOUT_S
from wfm_ds.distributed.world import find_free_port

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 300.0
NUM_IMAGES = 40
END_S = 120.0  # a deadline, no measure: from the death of one node to the end of the other

pytestmark = pytest.mark.long


class Nodes:
    """Two nodes of one rank each; what they print, and how they end."""

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
        until_s = time.monotonic() + WAIT_S
        while not path.exists():
            assert all(process.poll() is None for process in self.processes), self.printed()
            assert time.monotonic() < until_s, self.printed()
            time.sleep(0.2)

    def of_node(self, node):
        """The processes of a node, the rank last."""
        command = psutil.Process(self.processes[node].pid)
        return sorted([command, *command.children(recursive=True)], key=lambda process: process.create_time())

    def codes(self, timeout_s=WAIT_S):
        until_s = time.monotonic() + timeout_s
        return [process.wait(max(0.0, until_s - time.monotonic())) for process in self.processes]

    def printed(self):
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def end(self):
        for node, process in enumerate(self.processes):
            if process.poll() is None:
                for part in self.of_node(node):
                    with contextlib.suppress(psutil.Error):  # it may have gone meanwhile
                        part.kill()
            process.wait()


@pytest.fixture
def nodes(tiny_pipelines, tmp_path):
    started = []
    write_digits(tmp_path / "digits")
    images = sorted((tmp_path / "digits" / "images").iterdir())
    for file in images[2 * NUM_IMAGES :]:  # each has a caption beside it
        file.unlink()
    common = [
        str(ROOT / "tests" / "recipes" / "sd3_sft_lora.yaml"),
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={tmp_path / 'digits' / 'images'}",
        f"run.output_dir={tmp_path / 'out'}",
    ]

    def start(*overrides):
        started.append(Nodes(tmp_path, *common, *overrides))
        return started[-1]

    yield start
    for both in started:
        both.end()


ENDLESS = ("run.steps=100000", "checkpoint.every=2")


def result(folder):
    return json.loads((folder / "out" / "result.json").read_text())


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


def test_rewards_of_one_node_alone_are_refused_on_both(tiny_pipelines, tmp_path):
    words = [str(ROOT / "tests" / "recipes" / "sd3_nft.yaml"), f"model.path={tiny_pipelines('sd3')}"]
    both = Nodes(tmp_path, *words, f"run.output_dir={tmp_path / 'out'}")
    try:
        assert both.codes() == [2, 2], both.printed()
    finally:
        both.end()
    assert both.printed().count("error: reward.spawn: true: the reward service cannot be reached by 1 of 2 ranks") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_node_ends_the_other_which_names_it(nodes, tmp_path, dead):
    both = nodes(*ENDLESS)
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    parts = both.of_node(dead)
    for part in parts:
        part.kill()
    assert both.processes[1 - dead].wait(END_S) == 1, both.printed()
    said = both.logs[1 - dead].read_text()
    assert f"the run ends: rank {dead} (" in said
    assert "gone: its connection closed" in said
    if dead == 1:  # rank 0 writes it
        assert f"process {parts[-1].pid} on" in result(tmp_path)["message"]
        assert result(tmp_path)["status"] == "failed"


def test_sigterm_to_one_node_saves_and_ends_both(nodes, tmp_path):
    both = nodes(*ENDLESS)
    both.wait_for(tmp_path / "out" / "checkpoints" / "step_2" / "COMPLETE")
    both.processes[1].send_signal(signal.SIGTERM)
    assert both.codes() == [0, 0], both.printed()
    assert result(tmp_path)["status"] == "preempted"
    step = result(tmp_path)["step"]
    assert (tmp_path / "out" / "checkpoints" / f"step_{step}" / "COMPLETE").is_file()


# Python imports this at its start: an open of the image then waits for a pipe, as on a file system that is gone.
STALLED = """
import os, sys
def hook(event, arguments):
    if event == "open" and arguments[0] == os.environ["STALLED_IMAGE"] and os.path.exists(os.environ["STALLED_PIPE"]):
        os.open(os.environ["STALLED_PIPE"], os.O_RDONLY)
sys.addaudithook(hook)
"""


def test_a_rank_that_hangs_is_named_after_the_minutes_of_the_recipe(nodes, tmp_path, monkeypatch):
    """It reads a file that never comes: its process lives and its heart beats."""
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
