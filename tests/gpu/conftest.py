"""Fixtures that run test functions on a GPU: `pytest -m gpu tests/gpu`.

The functions run in a separate process, because the pytest process is configured for the CPU. WFM_TEST_DEVICE=cpu runs
the tests on a machine without a GPU.
"""

import os
from pathlib import Path

import pytest

from ranks import started

ENVIRONMENT = {"cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "cpu": {"TRITON_INTERPRET": "1"}}


@pytest.fixture(scope="session")
def device():
    """Return "cuda", or "cpu" if WFM_TEST_DEVICE=cpu."""
    wanted = os.environ.get("WFM_TEST_DEVICE", "cuda")
    if wanted == "cuda" and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a CUDA device; WFM_TEST_DEVICE=cpu rehearses these tests on a CPU")
    return wanted


def process(kind, folder):
    from wfm_ds.distributed.accelerator import find_free_port
    from wfm_ds.distributed.ranks import LOOPBACK, LaunchedRank

    # A process joins its group in the first call that needs it, and each call restores the environment. DeepSpeed reads
    # these variables in all calls.
    rank = LaunchedRank(0, 1, 0, 1, LOOPBACK, find_free_port(), launcher="python").variables()
    return started(1, folder, {"DS_ACCELERATOR": kind, **rank, **ENVIRONMENT[kind]})


@pytest.fixture(scope="session")
def there(device, tmp_path_factory):
    """`there(function, **kwargs)` runs the function in a process on the device and returns its result."""
    with process(device, tmp_path_factory.mktemp("there")) as ranks:
        yield lambda function, **kwargs: ranks.run(function, **kwargs)[0]


@pytest.fixture(scope="session")
def on_cpu(device, there, tmp_path_factory):
    """`on_cpu(function, **kwargs)` runs the function in a process on the CPU and returns its result."""
    if device == "cpu":  # a rehearsal shares one process, because starting it takes longer than most tests
        yield there
        return
    with process("cpu", tmp_path_factory.mktemp("on_cpu")) as ranks:
        yield lambda function, **kwargs: ranks.run(function, **kwargs)[0]


@pytest.fixture
def train(there, tiny_pipelines, tmp_path):
    """`train(where, name, *overrides)` runs a tiny recipe on the device with output in tmp_path/where."""
    from multi_rank.resuming import tiny_recipe, train_on_rank

    def run(where, name, *overrides, **stops):
        quiet = ["logging.console=false", "logging.tensorboard=false", "validation.at_start=false"]
        recipe = tiny_recipe(name, tmp_path / where, tiny_pipelines("sd3"), *quiet, *overrides)
        return there(train_on_rank, **recipe, **stops)

    return run
