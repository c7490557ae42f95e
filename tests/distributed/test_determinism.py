"""engine.deterministic in one process. tests/end_to_end tests that it applies to all processes."""

import os

import pytest
import torch

from wfm_ds.distributed.accelerator import deterministic_kernels
from wfm_ds.errors import RecipeError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def state():
    cudnn = torch.backends.cudnn
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, cudnn.deterministic, cudnn.benchmark, os.environ.get(CUBLAS)


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = state()[:3]
    yield
    assert state()[:3] == before


def no_deterministic_kernel():
    return torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 3]]]), 2)


def test_the_context_selects_deterministic_kernels_and_restores_the_settings():
    with deterministic_kernels(True):
        assert state() == (True, True, False, ":4096:8")
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            no_deterministic_kernel()
    assert no_deterministic_kernel().sum() == 2
    assert CUBLAS not in os.environ
    with pytest.raises(ZeroDivisionError), deterministic_kernels(True):
        raise ZeroDivisionError


def test_without_the_option_nothing_changes(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":0:0")
    before = state()
    with deterministic_kernels(False):
        assert state() == before


@pytest.mark.parametrize("given", [":4096:8", ":16:8"])
def test_a_valid_workspace_setting_of_the_user_is_kept(monkeypatch, given):
    monkeypatch.setenv(CUBLAS, given)
    with deterministic_kernels(True):
        assert os.environ[CUBLAS] == given
    assert os.environ[CUBLAS] == given


def test_a_contradicting_environment_is_refused(monkeypatch):
    monkeypatch.setenv(CUBLAS, ":0:0")
    refused = deterministic_kernels(True)
    with (
        pytest.raises(
            RecipeError,
            match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 makes cuBLAS nondeterministic.* set it to :4096:8 or :16:8",
        ),
        refused,
    ):
        pass


def test_deterministic_must_be_set_before_cuda_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refused = deterministic_kernels(True)
    with pytest.raises(RecipeError, match="CUDA was used before"), refused:
        pass
