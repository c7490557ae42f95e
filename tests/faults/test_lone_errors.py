"""A user error on one rank while the other rank waits in a collective."""

import json
import subprocess
import sys
import threading

import pytest
import torch

from faults.processes import until
from faults.small_runs import ROOT, end
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.distributed.fault import RankStates
from wfm_ds.distributed.heartbeat import Heartbeat, RankRegistry
from wfm_ds.distributed.world import World
from wfm_ds.errors import DataError
from wfm_ds.runs.shutdown import RunShutdown

WAIT_S = 300.0


def test_the_failing_rank_prints_the_error_and_the_others_use_its_exit_code():
    """The heartbeat uses real sockets. A call of `leave` with the exit code replaces the exit of the other process."""
    registry = RankRegistry(RankStates(2, silent_s=WAIT_S, stuck_s=WAIT_S, max_gap_s=WAIT_S), "127.0.0.1")
    endings = [RunShutdown(World(rank, 2, rank, torch.device("cpu"), None)) for rank in (0, 1)]
    left, codes = threading.Event(), []

    def leave(code):
        codes.append((code, endings[0].exit_code))
        left.set()

    for rank, ending in enumerate(endings):
        ending.heartbeat = Heartbeat(
            ("127.0.0.1", registry.port),
            registry.token,
            rank,
            on_end=ending.handle_fault,
            registry=None if rank else registry,
            exit_process=leave,
        )
    assert endings[1].agree_on_cause(DataError("clip.mp4: cannot be decoded")).is_reported_here
    assert left.wait(WAIT_S)
    assert codes == [(1, 2)]


@pytest.fixture
def running(tiny_pipelines, tmp_path):
    """Start an endless SFT run on two ranks with its log in tmp_path. Each rank evaluates one held-out image."""
    write_digits(tmp_path / "digits")
    images = sorted((tmp_path / "digits" / "images").glob("*.png"))
    (tmp_path / "held").mkdir()
    for image in images[:2]:
        for file in (image, image.with_suffix(".txt"), image.with_suffix(".json")):
            if file.exists():
                file.rename(tmp_path / "held" / file.name)
    recipe = [
        str(ROOT / "tests" / "recipes" / "sd3_sft.yaml"),
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={tmp_path / 'digits' / 'images'}",
        f"run.output_dir={tmp_path / 'out'}",
        *("run.steps=100000", "checkpoint.every=1", "validation.every=1", f"validation.path={tmp_path / 'held'}"),
    ]
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "wfm_ds.launch", "--num_gpus", "2", "-m", "wfm_ds.train", *recipe]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    yield process
    end([process])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_read_ends_the_run_with_its_error(running, tmp_path, rank):
    log, checkpoints = tmp_path / "log", tmp_path / "out" / "checkpoints"
    until(lambda: running.poll() is not None or any(checkpoints.glob("step_*")), WAIT_S)
    image = sorted((tmp_path / "held").glob("*.png"))[rank]
    damaged = image.with_suffix(".part")
    damaged.write_bytes(image.read_bytes()[:40])
    damaged.replace(image)
    assert running.wait(WAIT_S) == 2, log.read_text()
    said = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(said) == 1, log.read_text()
    assert said[0].startswith(f"error: {image}: cannot be decoded")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["status"] == "failed"
    assert f"{image}: cannot be decoded" in result["message"]
