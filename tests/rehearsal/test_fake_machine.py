"""Simulated GPUs: a real training step never waits for them, and the simulation finds each kind of mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rehearsal.watch import DENOISE, MICRO_STEPS

SCENES = Path(__file__).with_name("scenes.py")


@pytest.fixture(scope="module")
def outcomes(root):
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    paths = os.pathsep.join([str(root), str(root / "kernels"), str(root / "reward")])
    done = subprocess.run(
        [sys.executable, str(SCENES)],
        env=environment | {"PYTHONPATH": paths},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_queues_its_work_without_waiting(outcomes):
    assert outcomes["device"] == "cuda:0"
    for scene in ("as it is", "fused norms"):
        assert outcomes[scene] == dict.fromkeys((DENOISE, MICRO_STEPS), "nothing was raised")


def test_nccl_and_gloo_get_tensors_of_their_own_device(outcomes):
    backends = {(backend, device) for _, backend, device, _ in outcomes["collectives"]}
    assert backends == {("nccl", "cuda"), ("gloo", "cpu")}
    assert "nccl cannot allreduce_ a tensor of [1] torch.float32 on cpu" in outcomes["nccl"]
    assert "gloo cannot allreduce_ a tensor of [1] torch.float32 on cuda:0" in outcomes["gloo"]


@pytest.mark.parametrize("window", [DENOISE, MICRO_STEPS])
def test_a_number_that_the_denoiser_reads_is_named_with_its_place(outcomes, window):
    message = outcomes["read_number"][window]
    assert message.startswith("NotQuiet")
    assert f"waits in the {window}" in message
    assert "_local_scalar_dense" in message
    assert "tests/rehearsal/scenes.py" in message
    assert " read_number" in message


@pytest.mark.parametrize("window", [DENOISE, MICRO_STEPS])
def test_a_blocking_copy_of_the_denoiser_is_named_with_its_place(outcomes, window):
    message = outcomes["copy_to_device"][window]
    assert f"blocking copies in the {window}" in message
    assert "_to_copy host to device of 4 bytes" in message
    assert " copy_to_device" in message


def test_a_host_tensor_among_those_of_the_device_is_an_error(outcomes):
    assert not outcomes["mix_devices"].startswith("NotQuiet")
    assert all(word in outcomes["mix_devices"] for word in ("devices", "cuda:0", "cpu"))


def test_nothing_remains_after_the_block(outcomes):
    assert outcomes["undone"] == {"cuda": False, "groups": False, "sum": 3.0}
