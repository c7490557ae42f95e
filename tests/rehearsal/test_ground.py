"""The pretended GPUs: a real step is quiet where it must be, and each mistake that they are there to find is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rehearsal.watch import DENOISE, MICRO_STEPS

pytestmark = pytest.mark.slow  # 37 s of CPU, for all of them together

SCENES = Path(__file__).with_name("scenes.py")


@pytest.fixture(scope="module")
def seen(root):
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


def test_a_step_queues_its_work_and_waits_for_nothing_in_between(seen):
    assert seen["device"] == "cuda:0"
    assert seen["as it is"] == dict.fromkeys((DENOISE, MICRO_STEPS), "nothing was raised")


def test_nccl_and_gloo_get_tensors_of_their_own_device(seen):
    backends = {(backend, device) for _, backend, device, _ in seen["collectives"]}
    assert backends == {("nccl", "cuda"), ("gloo", "cpu")}
    assert "nccl cannot allreduce_ a tensor of [1] torch.float32 on cpu" in seen["nccl"]
    assert "gloo cannot allreduce_ a tensor of [1] torch.float32 on cuda:0" in seen["gloo"]


@pytest.mark.parametrize("window", [DENOISE, MICRO_STEPS])
def test_a_number_that_the_denoiser_reads_is_named_with_its_place(seen, window):
    message = seen["asks"][window]
    assert message.startswith("NotQuiet")
    assert f"waits in the {window}" in message
    assert "_local_scalar_dense" in message
    assert "tests/rehearsal/scenes.py" in message
    assert " asks" in message


@pytest.mark.parametrize("window", [DENOISE, MICRO_STEPS])
def test_a_blocking_copy_of_the_denoiser_is_named_with_its_place(seen, window):
    message = seen["copies"][window]
    assert f"blocking copies in the {window}" in message
    assert "_to_copy host to device of 4 bytes" in message
    assert " copies" in message


def test_a_host_tensor_among_those_of_the_device_is_an_error(seen):
    assert not seen["mixes"].startswith("NotQuiet")
    assert all(word in seen["mixes"] for word in ("devices", "cuda:0", "cpu"))


def test_nothing_of_it_stays_behind(seen):
    assert seen["undone"] == {"cuda": False, "groups": False, "sum": 3.0}
