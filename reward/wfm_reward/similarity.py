"""Similarity of a generated video to its recording: PSNR and SSIM."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

MAX_PSNR_DB = 60.0  # of equal frames, whose PSNR would be infinite
SSIM_WINDOW = 7  # pixels
PEAK = 255.0
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2

Frames = npt.NDArray[np.uint8]
"""[T,H,W,3]."""


def psnr(frames: Frames, reference: Frames) -> float:
    """Return the PSNR in dB, at most MAX_PSNR_DB, as the mean over the T frames. Both videos are uint8 [T,H,W,3].

    Raises ValueError if the shapes differ.
    """
    require_equal_shapes(frames, reference)
    return float(np.mean([frame_psnr(*pair) for pair in zip(frames, reference, strict=True)]))


def frame_psnr(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    """Return the PSNR in dB of two images [H,W,3]."""
    error = float(np.square(a.astype(np.float64) - b).mean())
    return MAX_PSNR_DB if error == 0 else min(MAX_PSNR_DB, 10 * math.log10(PEAK**2 / error))


def ssim(frames: Frames, reference: Frames) -> float:
    """Return the structural similarity, at most 1, as the mean over the T frames. Both videos are uint8 [T,H,W,3].

    Computed as in scikit-image's structural_similarity with its defaults: windows of 7 x 7 pixels inside the frame
    with equal weights, sample covariances, and the mean over positions and channels (Wang et al., 2004).
    Raises ValueError if the shapes differ or a frame is smaller than a window.
    """
    require_equal_shapes(frames, reference)
    if min(frames.shape[1:3]) < SSIM_WINDOW:
        raise ValueError(f"SSIM needs frames of at least {SSIM_WINDOW} x {SSIM_WINDOW} pixels, got {frames.shape[1:3]}")
    return float(np.mean([frame_ssim(*pair) for pair in zip(frames, reference, strict=True)]))


def frame_ssim(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    """Return the SSIM of two images [H,W,3]. Window sums are integers, so variances do not lose precision."""
    x, y, n = a.astype(np.int64), b.astype(np.int64), SSIM_WINDOW**2
    sum_x, sum_y = window_sums(x), window_sums(y)
    var_x, var_y, cov = (
        (n * window_sums(product) - sums) / (n * (n - 1))
        for product, sums in ((x * x, sum_x**2), (y * y, sum_y**2), (x * y, sum_x * sum_y))
    )
    mean_x, mean_y = sum_x / n, sum_y / n
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float(np.mean(luminance * (2 * cov + C2) / (var_x + var_y + C2)))


def window_sums(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the sums over all windows inside an image: [H,W,3] becomes [H-6,W-6,3]."""
    integral = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0), (0, 0)))
    k = SSIM_WINDOW
    sums: npt.NDArray[np.int64] = integral[k:, k:] - integral[:-k, k:] - integral[k:, :-k] + integral[:-k, :-k]
    return sums


def require_equal_shapes(frames: Frames, reference: Frames) -> None:
    if frames.shape != reference.shape or frames.ndim != 4:
        raise ValueError(f"videos must have one shape [T,H,W,3], got {frames.shape} and {reference.shape}")
