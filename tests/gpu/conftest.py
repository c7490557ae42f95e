"""Fixtures that run test functions on a GPU: `pytest -m gpu tests/gpu`.

The functions run in a separate process, because the pytest process is configured for the CPU. WFM_TEST_DEVICE=cpu runs
the tests on a machine without a GPU, except tests that use the `cuda` fixture.
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


@pytest.fixture(scope="session")
def cuda(device):
    """Skip the test on a CPU."""
    if device != "cuda":
        pytest.skip("says nothing on a CPU")
    return device


def process(kind, folder):
    return started(1, folder, {"DS_ACCELERATOR": kind, **ENVIRONMENT[kind]})


@pytest.fixture(scope="session")
def there(device, tmp_path_factory):
    """`there(function, **kwargs)` runs the function in a process on the device and returns its result."""
    with process(device, tmp_path_factory.mktemp("there")) as ranks:
        yield lambda function, **kwargs: ranks.run(function, **kwargs)[0]


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory):
    """`on_cpu(function, **kwargs)` runs the function in a process on the CPU and returns its result."""
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
