import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from each_case import check_each
from wfm_ds.sampling.latents import add_noise, draw_cpu_normal, draw_device_normal, noisy_latents
from wfm_kernels.torch_backend import normal_noise

SHAPES = [(2, 3, 5, 7), (3, 1, 3, 5, 2)]


@check_each("shape", [(4, 3, 5), (1, 1, 1), (2, 3, 4, 5)])
def test_plain_diffusers_generates_the_same_noise_from_the_seeds(shape):
    seeds = [0, 7, 2**62 + 11]
    generators = [torch.Generator("cpu").manual_seed(s) for s in seeds]
    theirs = randn_tensor((3, *shape), generator=generators, dtype=torch.float32)
    ours = draw_cpu_normal(seeds, shape, "cpu")
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


def test_noise_depends_on_the_seed_and_not_on_the_batch_or_the_global_state():
    torch.manual_seed(1)
    together = draw_cpu_normal([5, 6, 5], (2, 4, 4))
    state = torch.get_rng_state()
    alone = draw_cpu_normal([6], (2, 4, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(together[1], alone[0])
    assert torch.equal(together[0], together[2])
    assert not torch.equal(together[0], together[1])


def test_cpu_noise_uses_the_low_32_bits_of_the_seed():
    whole, low, other = draw_cpu_normal([5 + 2**40, 5, 4], (2, 4, 4))
    assert torch.equal(whole, low)
    assert not torch.equal(low, other)


def test_noise_for_no_samples_is_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        draw_cpu_normal([], (1, 2, 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_follows_the_contract_and_is_written_into_the_latents(shape):
    clean, sigma, seeds = torch.randn(shape), torch.linspace(0.1, 1, shape[0]), [2**62 + i for i in range(shape[0])]
    noisy, noise = add_noise(clean, sigma, seeds)
    assert torch.equal(noise, normal_noise(torch.tensor(seeds), clean[0].numel()).view(shape))
    assert torch.equal(noise, draw_device_normal(torch.tensor(seeds), clean))
    assert torch.equal(noisy, noisy_latents(clean, noise, sigma))


@check_each(
    ("clean", "noise", "sigma", "message"),
    [
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 4), torch.zeros(2), "the same shape"),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 3), torch.zeros(2, 1), r"sigma must be \[2\]"),
        (torch.zeros(2, 1, 3, 3), torch.zeros(2, 1, 3, 3), torch.zeros(()), r"sigma must be \[2\]"),
        (
            torch.zeros(2, 1, 3, 3),
            torch.zeros(2, 1, 3, 3),
            torch.zeros(2, dtype=torch.int64),
            "sigma must be torch.float",
        ),
        (torch.zeros(2, 1, 3, 3).bfloat16(), torch.zeros(2, 1, 3, 3), torch.zeros(2), "float32"),
        (torch.zeros(2, 1, 3, 3).long(), torch.zeros(2, 1, 3, 3).long(), torch.zeros(2), "float32"),
        (torch.zeros(2, 9, 1), torch.zeros(2, 9, 1), torch.zeros(2), r"\[B,C,h,w\]"),
        (torch.zeros(0, 1, 3, 3), torch.zeros(0, 1, 3, 3), torch.zeros(0), "non-empty"),
    ],
)
def test_mismatched_arguments_are_refused(clean, noise, sigma, message):
    with pytest.raises(ValueError, match=message):
        noisy_latents(clean, noise, sigma)
