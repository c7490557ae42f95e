"""A process that computes on a GPU, for the tests of this folder: `pytest -m gpu tests/gpu`.

Their bodies run in a process of its own, whose environment says so, because the process of pytest keeps to the CPU.
WFM_TEST_DEVICE=cpu rehearses them without a GPU: every line but those of tests that ask for `cuda`.
"""

import os
from pathlib import Path

import pytest

from ranks import started

ENVIRONMENT = {"cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "cpu": {"TRITON_INTERPRET": "1"}}


@pytest.fixture(scope="session")
def device():
    """cuda, or cpu in a rehearsal."""
    wanted = os.environ.get("WFM_TEST_DEVICE", "cuda")
    if wanted == "cuda" and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a CUDA device; WFM_TEST_DEVICE=cpu rehearses these tests on a CPU")
    return wanted


@pytest.fixture(scope="session")
def cuda(device):
    """For a test that a CPU cannot rehearse."""
    if device != "cuda":
        pytest.skip("says nothing on a CPU")
    return device


def process(kind, folder):
    return started(1, folder, {"DS_ACCELERATOR": kind, **ENVIRONMENT[kind]})


@pytest.fixture(scope="session")
def there(device, tmp_path_factory):
    """`there(function, **kwargs)`: the function's result, computed by a process that uses the device."""
    with process(device, tmp_path_factory.mktemp("there")) as ranks:
        yield lambda function, **kwargs: ranks.run(function, **kwargs)[0]


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory):
    """The same by a process that keeps to the CPU."""
    with process("cpu", tmp_path_factory.mktemp("on_cpu")) as ranks:
        yield lambda function, **kwargs: ranks.run(function, **kwargs)[0]


@pytest.fixture
def train(there, tiny_pipelines, tmp_path):
    """Run a tiny recipe into tmp_path/where on the device."""
    from multi_rank.resuming import tiny_recipe, train_on_rank

    def run(where, name, *overrides, **stops):
        quiet = ["logging.console=false", "logging.tensorboard=false", "validation.at_start=false"]
        recipe = tiny_recipe(name, tmp_path / where, tiny_pipelines("sd3"), *quiet, *overrides)
        return there(train_on_rank, **recipe, **stops)

    return run
