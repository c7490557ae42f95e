"""The VAE of the video quickstart: a real VAE with latents equal to the pixels."""

import torch

from each_case import check_each
from wfm_ds.models.tiny.vaes import exact_vae


@check_each("num_frames", [1, 5, 9])
def test_latents_are_the_cells_of_four_frames_and_decode_to_them(num_frames):
    cells = 2 * torch.rand(2, num_frames, 8, 8, generator=torch.Generator().manual_seed(num_frames)) - 1
    grey = cells.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    pixels = grey[:, None].expand(-1, 3, -1, -1, -1)
    vae = exact_vae()
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        drawn = vae.decode(posterior.mode()).sample
    want = torch.zeros(2, 4, 1 + (num_frames - 1) // 4, 8, 8)
    want[:, 0, 0] = cells[:, 0]
    want[:, :, 1:] = cells[:, 1:].unflatten(1, (-1, 4)).transpose(1, 2)
    torch.testing.assert_close(posterior.mode(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(drawn, pixels, rtol=0, atol=1e-6)
    assert posterior.std.max() < 1e-6
