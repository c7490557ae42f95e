"""Kernels are launched on the device of their tensors instead of the thread's current device. No kernel runs here."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from wfm_kernels import norm_triton, triton_backend

SHAPE = (2, 4, 8)


class Recorder:
    """A fake kernel that records the current device."""

    def __init__(self, device_now):
        self.device_now, self.launched_on = device_now, []

    def __getattr__(self, name):
        return self

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launched_on.append(self.device_now())


@pytest.fixture
def recorder(monkeypatch):
    """Simulate a thread with current device 0, without a GPU."""
    current = [0]

    def exchange(index):
        before = current[0]
        if index >= 0:  # as in torch
            current[0] = index
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0)
    recorder = Recorder(lambda: current[0])
    for module in (triton_backend, norm_triton):
        monkeypatch.setattr(module, "kernels", recorder)
    yield recorder
    assert current == [0]


def operators(device):
    """Return a call of each operator with tensors on this device."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    x, rows, table, seeds = empty(*SHAPE), empty(SHAPE[0]), empty(SHAPE[0], 8), empty(SHAPE[0], dtype=torch.int64)
    return {
        "sde_step": lambda: triton_backend.sde_step(x, x, table, seeds, None, True),
        "sde_log_prob": lambda: triton_backend.sde_log_prob(x, x, x, table),
        "sde_log_prob_backward": lambda: triton_backend.sde_log_prob_backward(rows, x, x, x, table),
        "nft_loss": lambda: triton_backend.nft_loss(x, x, x, x, rows, rows, None, 1.0),
        "nft_loss_backward": lambda: triton_backend.nft_loss_backward(
            rows, None, x, x, x, x, rows, rows, None, empty(7, SHAPE[0]), 1.0
        ),
        "flow_noise": lambda: triton_backend.flow_noise(x, rows, seeds, None),
        "rms_norm": lambda: norm_triton.rms_norm(x, None, 1e-6, True),
        "rms_norm_backward": lambda: norm_triton.rms_norm_backward(x, x, empty(SHAPE[2]), 1e-6, True, True, True),
        "adaptive_norm": lambda: norm_triton.adaptive_norm(x, x, x, 1e-6, True, True),
        "adaptive_norm_backward": lambda: norm_triton.adaptive_norm_backward(
            x, x, x, 1e-6, True, True, True, True, False
        ),
        "gate_residual": lambda: norm_triton.gate_residual(x, x, x),
        "gate_residual_backward": lambda: norm_triton.gate_residual_backward(x, x, x, True, True),
    }


@pytest.mark.parametrize("name", operators("cpu"))
@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(recorder, name, device):
    with FakeTensorMode():
        operators(device)[name]()
    assert recorder.launched_on
    assert set(recorder.launched_on) == {1 if device == "cuda:1" else 0}
