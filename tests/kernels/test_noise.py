import math

import pytest
import torch

from kernel_cases import BACKENDS, BF16, BLOCK, DEVICE, FP32
from wfm_kernels import NOISE_CONTRACT, flow_noise, triton_backend
from wfm_kernels.torch_backend import _BLOCK, normal_from_words, normal_noise, philox_words

SEEDS = [0, 7, -5, 2**40 + 3, 2**62, 2**63 - 1, -(2**63)]
N = 20_000


def draw(seeds, n, backend):
    """Return the noise of these seeds from the operator; at sigma 1 the noisy latents equal the noise."""
    seeds = torch.tensor(seeds, device=DEVICE)
    clean = torch.zeros((len(seeds), n), device=DEVICE)
    noisy, noise = flow_noise(clean, torch.ones(len(seeds), device=DEVICE), seeds=seeds, backend=backend)
    assert torch.equal(noisy, noise)
    return noise.cpu()


@pytest.mark.unit
def test_words_equal_the_published_philox_answers():
    """Known answers of Philox4x32-10 for counter and key 0 (Salmon et al. 2011, Random123's kat_vectors)."""
    words = philox_words(torch.tensor([0]), 1)[0, 0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.unit
def test_the_contract_does_not_change():
    """A failure means that seeds give different noise than before: increase NOISE_CONTRACT."""
    assert NOISE_CONTRACT == 1
    assert philox_words(torch.tensor([2**40 + 3]), 3)[0, 2].tolist() == [34154909, 2045071214, 4078692270, 1582146381]
    want = [-2.1904447, 0.0041903, 0.8154807, 1.5128454, -0.5405782, 0.3457741]
    assert normal_noise(torch.tensor([7]), 6)[0].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("count", "n"), [(1, 3 * 4 * _BLOCK + 5), (3, 4 * _BLOCK), (7, 4 * (_BLOCK // 7) + 1)])
def test_draws_by_block_equal_one_draw(count, n):
    seeds = torch.tensor(SEEDS[-count:])
    whole = normal_from_words(philox_words(seeds, -(-n // 4))).flatten(1)[:, :n]
    assert torch.equal(normal_noise(seeds, n), whole)


def test_kernel_and_torch_draw_the_same_normals():
    torch.testing.assert_close(draw(SEEDS, 5003, "triton"), draw(SEEDS, 5003, "torch"), rtol=0, atol=1e-6)


def test_the_launch_shape_does_not_change_the_noise(monkeypatch):
    before = draw([3, 2**35], 5000, "triton")
    monkeypatch.setattr(triton_backend, "BLOCK", BLOCK // 4)
    assert torch.equal(draw([3, 2**35], 5000, "triton"), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_depends_only_on_seed_and_position(backend):
    together = draw([5, 6, 5, -1], 4099, backend)
    assert torch.equal(together[0], together[2])
    assert torch.equal(draw([6], 4099, backend)[0], together[1])
    assert torch.equal(draw([-1, 5], 1001, backend), together[[3, 0], :1001])
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_and_correlations_are_those_of_independent_normals(backend):
    a, b = draw([11, 12], N, backend).double()
    for z in (a, b):
        moments = [(z.mean(), 0, 1), ((z**2).mean(), 1, 2), ((z**3).mean(), 0, 15), ((z**4).mean(), 3, 96)]
        for got, want, variance in moments:
            assert abs(got - want) < 4 * math.sqrt(variance / N)
        for lag in (1, 2, 3, 4, 5):
            assert abs((z[:-lag] * z[lag:]).mean()) < 4 / math.sqrt(N)
        below = torch.special.ndtr(z).sort().values
        distance = (below - (torch.arange(N) + 0.5) / N).abs().max() + 0.5 / N
        assert distance * math.sqrt(N) < 1.95  # Kolmogorov-Smirnov test, 99.9 % quantile
    assert abs((a * b).mean()) < 4 / math.sqrt(N)
    assert abs((a.abs() * b.abs()).mean() - 2 / math.pi) < 4 / math.sqrt(N)


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbouring_seeds_are_independent_too(backend):
    z = draw(range(64), 400, backend).double()
    correlation = (z @ z.T / 400)[~torch.eye(64, dtype=bool)]
    assert correlation.abs().max() < 5.5 / math.sqrt(400)
    assert abs(correlation.mean()) < 4 / math.sqrt(400 * 64 * 63 / 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_float32_for_any_latents(backend):
    seeds = torch.tensor([1, 2], device=DEVICE)
    clean, sigma = torch.zeros((2, 5, 3), device=DEVICE), torch.full((2,), 0.5, device=DEVICE)
    _, noise = flow_noise(clean.to(BF16), sigma, seeds=seeds, backend=backend)
    assert noise.dtype == FP32
    assert torch.equal(noise, flow_noise(clean, sigma, seeds=seeds, backend=backend)[1])
