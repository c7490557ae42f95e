"""PSNR and SSIM, compared with formulas that are evaluated window by window in float64."""

import numpy as np
import pytest

from wfm_reward.similarity import STRIP_ROWS, psnr, ssim

RNG = np.random.default_rng(0)


def ssim_by_windows(a, b):
    """Return scikit-image's structural_similarity(a, b, channel_axis=-1, data_range=255) of two images."""
    values = []
    for channel in range(3):
        for top in range(a.shape[0] - 6):
            for left in range(a.shape[1] - 6):
                x, y = (image[top : top + 7, left : left + 7, channel].astype(np.float64).ravel() for image in (a, b))
                cov = np.cov(x, y)
                above = (2 * x.mean() * y.mean() + 2.55**2) * (2 * cov[0, 1] + 7.65**2)
                below = (x.mean() ** 2 + y.mean() ** 2 + 2.55**2) * (cov[0, 0] + cov[1, 1] + 7.65**2)
                values.append(above / below)
    return np.mean(values)


def noisy(video, size):
    return np.clip(video + RNG.normal(scale=size, size=video.shape), 0, 255).astype(np.uint8)


def test_ssim_and_psnr_equal_their_formulas():
    video = RNG.integers(0, 256, (3, STRIP_ROWS + 9, 9, 3)).astype(np.uint8)  # two strips
    video[0, :9] = 254  # the largest sums, with variances of almost 0
    for size in (1, 20, 200):
        other = noisy(video, size)
        expected = np.mean([ssim_by_windows(*pair) for pair in zip(other, video, strict=True)])
        assert ssim(other, video) == pytest.approx(expected, abs=1e-9)
        errors = ((other.astype(np.float64) - video) ** 2).reshape(3, -1).mean(1)
        assert psnr(other, video) == pytest.approx(np.mean(20 * np.log10(255 / np.sqrt(errors))), abs=1e-9)


def test_known_values():
    """The error of one grey level is 48.13 dB. Equal frames have the largest values, inverted ones a negative SSIM."""
    video = RNG.integers(1, 255, (2, 8, 16, 3)).astype(np.uint8)
    assert (ssim(video, video), psnr(video, video)) == (pytest.approx(1.0), 60.0)
    assert psnr(video + np.uint8(1), video) == pytest.approx(48.1308, abs=1e-4)
    assert ssim(255 - video, video) < 0
    black, white = np.zeros_like(video), np.full_like(video, 255)
    assert psnr(black, white) == pytest.approx(0)
    mixed = np.stack([black[0], white[1]])
    assert psnr(mixed, white) == pytest.approx(30)  # the mean of 0 and 60 dB


def test_frames_that_cannot_be_compared_are_refused():
    video = np.zeros((2, 8, 16, 3), np.uint8)
    for other, function in ((video[:1], psnr), (video[:1], ssim), (video[0], psnr)):
        with pytest.raises(ValueError, match="must have one shape"):
            function(other, video)
    with pytest.raises(ValueError, match="at least 7 x 7 pixels"):
        ssim(video[:, :6], video[:, :6])
