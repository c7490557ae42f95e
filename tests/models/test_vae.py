import pytest
import torch
from diffusers import AutoencoderKL

from wfm_ds.models import vae
from wfm_ds.models.tiny.vaes import identity_vae


def tiny_kl(**config):
    torch.manual_seed(0)
    return AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4, **config).eval()


def test_identity_vae_returns_the_pixels():
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pixels[0] = torch.tensor([-1.0, 1.0]).repeat(32).view(8, 8)  # include both ends of the range
    with torch.no_grad():
        latents = vae.encode_normalized(identity_vae(), pixels)
        torch.testing.assert_close(latents, pixels, rtol=0, atol=1e-6)
        torch.testing.assert_close(vae.decode_normalized(identity_vae(), latents), pixels, rtol=0, atol=1e-4)


def test_latents_are_the_normalised_posterior_mode():
    model, pixels = tiny_kl(shift_factor=0.25, scaling_factor=2.0), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        first, second = vae.encode_normalized(model, pixels), vae.encode_normalized(model, pixels)
        mean = model.encode(pixels).latent_dist.mean
    assert torch.equal(first, second)
    torch.testing.assert_close(first, (mean - 0.25) * 2.0, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "expected"), [({}, 0.0), ({"shift_factor": 0.5}, 0.5)])
def test_a_missing_shift_is_zero(config, expected):
    assert vae.latent_shift_and_scale(tiny_kl(scaling_factor=3.0, **config)) == (expected, 3.0)
