"""Tests specific to Stable Diffusion 3; test_families.py has the tests that all families share."""

import pytest
import torch


def test_encoding_inverts_decoding_for_pixels(load):
    model = load("digits")
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.decode_latents(model.encode_pixels(pixels)), pixels, rtol=0, atol=1e-4)


def test_wrong_pixels_are_refused(load):
    model = load("sd3")
    with pytest.raises(ValueError, match="width must be a multiple of 4"):
        model.encode_pixels(torch.rand(1, 3, 32, 30))
    with pytest.raises(ValueError, match="float32"):
        model.encode_pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[B,3,H,W\]"):
        model.encode_pixels(torch.rand(3, 32, 32))
    with pytest.raises(ValueError, match="num_frames"):
        model.latent_shape(32, 32, num_frames=5)
