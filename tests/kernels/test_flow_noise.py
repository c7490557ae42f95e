import pytest
import torch

from each_case import check_each
from kernel_cases import BACKENDS, BF16, DEVICE, FP16, FP32, SHAPES, VALUE, close, normal, vector
from wfm_kernels import flow_noise, reference


@pytest.mark.unit
@check_each("backend", BACKENDS)
@check_each("source", ["seeds", "noise"])
@check_each("shape", SHAPES)
def test_noisy_latents_are_the_linear_path(shape, source, backend):
    for dtype in (FP32, BF16, FP16):
        clean, sigma = normal(shape, 0, dtype), vector((1.0, 0.2, 0.0, 0.7), shape[0])
        seeds = torch.arange(shape[0], device=DEVICE) + 2**50
        chosen = {"seeds": seeds} if source == "seeds" else {"noise": normal(shape, 1)}
        noisy, noise = flow_noise(clean, sigma, **chosen, backend=backend)
        assert noisy.dtype == dtype
        assert noise.dtype == FP32
        assert torch.equal(noise, chosen.get("noise", noise))
        exact = [t.double().cpu() for t in (clean, sigma, noise)]
        close(noisy, reference.flow_noise(*exact), VALUE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ends_of_the_path_are_exact(backend):
    clean, noise = normal((3, 700), 0), normal((3, 700), 1)
    for sigma, want in ((0.0, clean), (1.0, noise)):
        noisy, _ = flow_noise(clean, vector((sigma,), 3), noise=noise, backend=backend)
        assert torch.equal(noisy, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_layout_does_not_change_the_result(backend):
    clean, sigma = normal((2, 6, 10, 30), 0), vector((0.9, 0.31), 2)
    seeds = torch.tensor([5, 6], device=DEVICE)
    noisy, noise = flow_noise(clean, sigma, seeds=seeds, backend=backend)
    strided = clean.to(memory_format=torch.channels_last)
    again, drawn = flow_noise(strided, sigma, seeds=torch.stack([seeds, seeds], 1)[:, 0], backend=backend)
    assert torch.equal(again, noisy)
    assert torch.equal(drawn, noise)
    assert again.is_contiguous()


@pytest.mark.unit
@check_each(
    ("changes", "message"),
    [
        ({"sigma": torch.zeros(2, 1)}, r"sigma must be \[2\]"),
        ({"sigma": torch.zeros(())}, r"sigma must be \[2\]"),
        ({"sigma": torch.zeros(2).double()}, "sigma must be torch.float32"),
        ({"clean_latents": torch.zeros(2, 9).long()}, "clean_latents must be float32"),
        ({"noise": torch.zeros(2, 9)}, "got both"),
        ({"seeds": None}, "got neither"),
        ({"seeds": torch.zeros(3).long()}, r"seeds must be \[2\] int64"),
        ({"seeds": None, "noise": torch.zeros(2, 9).bfloat16()}, "noise must be torch.float32"),
        ({"seeds": None, "noise": torch.zeros(2, 1)}, "one shape"),
    ],
)
def test_mismatched_arguments_are_refused(changes, message):
    inputs = {"clean_latents": torch.zeros(2, 9), "sigma": torch.zeros(2), "seeds": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        flow_noise(**inputs | changes)
