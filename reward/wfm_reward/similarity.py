"""Similarity of a generated video to its recording, or of an edited image to its source: PSNR and SSIM."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

MAX_PSNR_DB = 60.0  # PSNR of equal frames, which would otherwise be infinite
SSIM_WINDOW = 7  # pixels
GAUSSIAN_RADIUS, GAUSSIAN_SIGMA = 5, 1.5  # of the windows of `gaussian_ssim_map`, in pixels
STRIP_ROWS = 16  # rows of windows
PEAK = 255.0
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2

Frames = npt.NDArray[np.uint8]
"""RGB frames [T,H,W,3] of a video."""


def psnr(frames: Frames, reference: Frames) -> float:
    """Return the PSNR in dB, averaged over the T frames. Both videos are uint8 [T,H,W,3].

    The PSNR of each frame is limited to MAX_PSNR_DB. Raises ValueError if the shapes differ.
    """
    require_equal_shapes(frames, reference)
    return float(np.mean([frame_psnr(*pair) for pair in zip(frames, reference, strict=True)]))


def frame_psnr(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    error = float(np.square(a.astype(np.float64) - b).mean())
    return MAX_PSNR_DB if error == 0 else min(MAX_PSNR_DB, 10 * math.log10(PEAK**2 / error))


def ssim(frames: Frames, reference: Frames) -> float:
    """Return the structural similarity, at most 1, averaged over the T frames. Both videos are uint8 [T,H,W,3].

    Computed as in scikit-image's structural_similarity with its defaults (windows of 7 x 7 pixels). Raises ValueError
    if the shapes differ or a frame is smaller than a window.
    """
    require_equal_shapes(frames, reference)
    if min(frames.shape[1:3]) < SSIM_WINDOW:
        raise ValueError(f"SSIM needs frames of at least {SSIM_WINDOW} x {SSIM_WINDOW} pixels, got {frames.shape[1:3]}")
    return float(np.mean([frame_ssim(*pair) for pair in zip(frames, reference, strict=True)]))


def frame_ssim(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    last = SSIM_WINDOW - 1
    num_windows = (a.shape[0] - last) * (a.shape[1] - last) * a.shape[2]
    strips = [slice(top, top + STRIP_ROWS + last) for top in range(0, a.shape[0] - last, STRIP_ROWS)]
    return float(sum(sum_ssim(a[rows], b[rows]) for rows in strips) / num_windows)


def sum_ssim(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    x, y, n = a.astype(np.int32), b.astype(np.int32), SSIM_WINDOW**2
    sum_x, sum_y = window_sums(x), window_sums(y)
    mean_product, mean_squares = 2 * sum_x * sum_y, sum_x * sum_x + sum_y * sum_y
    covariance, variances = 2 * n * window_sums(x * y) - mean_product, n * window_sums(x * x + y * y) - mean_squares
    c1, c2 = C1 * n * n, C2 * n * (n - 1)
    return float(np.sum((mean_product + c1) * (covariance + c2) / ((mean_squares + c1) * (variances + c2))))


def window_sums(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the sums over all 7 x 7 windows inside an image: [H,W,3] becomes [H-6,W-6,3]."""
    for axis in (0, 1):
        rows = values.swapaxes(0, axis)
        pairs = rows[:-1] + rows[1:]
        fours = pairs[:-2] + pairs[2:]
        values = (fours[:-3] + pairs[4:-1] + rows[6:]).swapaxes(0, axis)  # 4 + 2 + 1 rows
    return values


def gaussian_ssim_map(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return the structural similarity of two images [H,W,3] around each pixel, [H-10,W-10,3].

    The windows have 11 x 11 pixels with Gaussian weights of sigma 1.5, as in Wang et al. 2004. Pixels without a
    complete window are omitted. Raises ValueError if an image is smaller than a window.
    """
    if min(a.shape[:2]) <= 2 * GAUSSIAN_RADIUS:
        size = 2 * GAUSSIAN_RADIUS + 1
        raise ValueError(f"SSIM needs images of at least {size} x {size} pixels, got {a.shape[:2]}")
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y, mean_xy = gaussian_means(x), gaussian_means(y), gaussian_means(x * y)
    mean_squares = mean_x * mean_x + mean_y * mean_y
    variances = gaussian_means(x * x + y * y) - mean_squares
    covariance = mean_xy - mean_x * mean_y
    similarity: npt.NDArray[np.float64] = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
    return similarity / ((mean_squares + C1) * (variances + C2))


def gaussian_means(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weighted means over all Gaussian windows inside an image: [H,W,3] becomes [H-10,W-10,3]."""
    from scipy.ndimage import correlate1d

    weights = np.exp(-0.5 * (np.arange(-GAUSSIAN_RADIUS, GAUSSIAN_RADIUS + 1) / GAUSSIAN_SIGMA) ** 2)
    inside = slice(GAUSSIAN_RADIUS, -GAUSSIAN_RADIUS)
    rows = correlate1d(values, weights / weights.sum(), axis=0)[inside]
    means: npt.NDArray[np.float64] = correlate1d(rows, weights / weights.sum(), axis=1)[:, inside]
    return means


def require_equal_shapes(frames: Frames, reference: Frames) -> None:
    if frames.shape != reference.shape or frames.ndim != 4:
        raise ValueError(f"videos must have one shape [T,H,W,3], got {frames.shape} and {reference.shape}")
