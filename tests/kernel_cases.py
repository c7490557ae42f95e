"""Inputs and float64 references shared by the kernel tests. A case maps argument names to tensors."""

import torch

from wfm_kernels import reference, sde_coefficients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Relative errors. In half precision, this is the error of one rounding to the storage dtype.
VALUE = {FP32: 2e-6, BF16: 3e-3, FP16: 1e-3}
GRADIENT = {FP32: 5e-6, BF16: 3e-3, FP16: 1e-3}
BLOCK = 2048
# One element, prime sizes, one element per sample, block boundaries, several blocks, images and videos.
SHAPES = [
    (1, 1),
    (1, 7),
    (5, 1, 1, 1),
    (3, 4, 7, 5),
    (2, 3, 3, 5, 2),
    (2, BLOCK - 1),
    (1, BLOCK),
    (1, BLOCK + 1),
    (2, 4 * BLOCK + 13),
]
# Noise levels of each sample's step. The first starts at sigma 1. None has a log-prob close to 0.
SIGMA, SIGMA_NEXT = (1.0, 0.8, 0.45, 0.7, 0.9), (0.93, 0.7, 0.25, 0.5, 0.6)
SIGMA_MAX, ETA = 0.93, 0.7
KINDS = ["flow_sde", "dance", "cps"]


def normal(shape, seed, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype).to(DEVICE)


def vector(values, count, dtype=FP32):
    return torch.tensor([values[i % len(values)] for i in range(count)], dtype=dtype, device=DEVICE)


def close(got, want, relative):
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape
    assert got.isfinite().all()
    assert (got - want).norm() <= relative * want.norm(), ((got - want).norm() / want.norm()).item()


def relative_error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def coefficients(kind, count, eta=ETA):
    rows = [torch.tensor([values[i % 5] for i in range(count)], dtype=FP64) for values in (SIGMA, SIGMA_NEXT)]
    return sde_coefficients(kind, *rows, eta=eta, sigma_max=SIGMA_MAX).to(DEVICE)


def transition(shape, velocity=FP32, latents=FP32):
    return {"velocity": normal(shape, 0, velocity), "latents": normal(shape, 1, latents)}


def exact_mean(kind, case):
    """Return the transition's mean and std in float64, and the velocity in float64 for gradients."""
    v = case["velocity"].detach().double().cpu().requires_grad_()
    x, count = case["latents"].double().cpu(), len(v)
    sigma, after = (torch.tensor([s[i % 5] for i in range(count)], dtype=FP64) for s in (SIGMA, SIGMA_NEXT))
    levels = torch.full((count,), ETA, dtype=FP64)
    mean, std = reference.sde_mean_and_std(kind, x, v, sigma, after, levels, SIGMA_MAX)
    return mean, std, v


def nft_case(shape, velocity=FP32, latents=FP32, *, ref=False):
    names = ["velocity", "old_velocity", "clean_latents", "noise", *["ref_velocity"] * ref]
    case = {name: normal(shape, i, velocity if "velocity" in name else latents) for i, name in enumerate(names)}
    case["old_velocity"] = (case["velocity"].float() + 0.2 * case["old_velocity"].float()).to(velocity)
    case["velocity"].requires_grad_()
    return case | {
        "sigma": vector((0.6, 0.2, 0.95, 1.0), shape[0]),
        "reward_weight": vector((0.37, 1.0, 0.57, 0.0), shape[0]),
    }


def in_double(case):
    """Convert the tensors of a case to float64 on the CPU. `requires_grad` is preserved."""
    exact = {name: t.detach().double().cpu() for name, t in case.items()}
    for name, tensor in case.items():
        exact[name].requires_grad_(tensor.requires_grad)
    return exact
