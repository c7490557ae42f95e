import pytest
import torch
from diffusers import AutoencoderKL

from each_case import check_each
from wfm_ds.models import vae
from wfm_ds.models.tiny.vaes import exact_vae, identity_vae


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


@check_each("num_frames", [1, 5, 9])
def test_latents_are_the_cells_of_four_frames_and_decode_to_them(num_frames):
    cells = 2 * torch.rand(2, num_frames, 8, 8, generator=torch.Generator().manual_seed(num_frames)) - 1
    grey = cells.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    pixels = grey[:, None].expand(-1, 3, -1, -1, -1)
    exact = exact_vae()
    with torch.no_grad():
        posterior = exact.encode(pixels).latent_dist
        drawn = exact.decode(posterior.mode()).sample
    want = torch.zeros(2, 4, 1 + (num_frames - 1) // 4, 8, 8)
    want[:, 0, 0] = cells[:, 0]
    want[:, :, 1:] = cells[:, 1:].unflatten(1, (-1, 4)).transpose(1, 2)
    torch.testing.assert_close(posterior.mode(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(drawn, pixels, rtol=0, atol=1e-6)
    assert posterior.std.max() < 1e-6
