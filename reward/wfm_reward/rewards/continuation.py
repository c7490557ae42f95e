"""Similarity of a video to the recording that it continues."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score
from wfm_reward.rewards._weights import load_lpips, to_lpips_tensor
from wfm_reward.similarity import MAX_PSNR_DB, psnr, ssim

FULL_SCORE_DB = 40.0  # PSNR of a video that the eye cannot tell from the recording
LPIPS_BATCH = 8  # frames


class Continuation(ItemReward):
    """Weighted mean of PSNR / 40 dB (at most 1), SSIM and 1 - LPIPS between a video and its recording.

    Conditioning frames are omitted. The recording is first encoded and decoded by the VAE, so that a perfect sample
    scores 1. A video has a recording only if the run generates it with the trajectory of the recording. The reward also
    reports `psnr_db`, `ssim`, and, if its weight is above 0, `lpips`.
    """

    name = primary_output = "continuation"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        "continuation": Range(-1.0, 1.0),
        "psnr_db": Range(0.0, MAX_PSNR_DB),
        "ssim": Range(-1.0, 1.0),
        "lpips": Range(0.0, float("inf")),
    }
    needs_reference = True

    def __init__(
        self, device: str = "cpu", *, psnr: float = 1.0, ssim: float = 1.0, lpips: float = 0.0, net: str = "alex"
    ) -> None:
        """psnr, ssim, lpips: weights; 0 disables the part. net: network of LPIPS: alex, vgg or squeeze.

        Raises RewardError if a weight is negative or all weights are 0.
        """
        super().__init__(device)
        if min(psnr, ssim, lpips) < 0 or psnr + ssim + lpips <= 0:
            raise RewardError(
                f"reward {self.name}: the weights psnr {psnr:g}, ssim {ssim:g} and lpips {lpips:g} must be at least 0, "
                "and one above 0"
            )
        self.weights, self.net = {"psnr": psnr, "ssim": ssim, "lpips": lpips}, net

    def load(self) -> None:
        if self.weights["lpips"]:
            self._lpips = load_lpips(self.name, self.net, self.device)

    def score_item(self, item: MediaItem) -> Score:
        reference = item.reference
        assert reference is not None, "the worker requires it"
        frames = item.frames[-len(reference) :]
        if frames.shape != reference.shape:
            return item.fail(f"the reference has shape {list(reference.shape)}, the video {list(item.frames.shape)}")
        parts = {"psnr_db": psnr(frames, reference)}
        terms = {"psnr": min(1.0, parts["psnr_db"] / FULL_SCORE_DB)}
        if self.weights["ssim"]:
            parts["ssim"] = terms["ssim"] = ssim(frames, reference)
        if self.weights["lpips"]:
            parts["lpips"] = self.measure_lpips(frames, reference)
            terms["lpips"] = max(-1.0, 1.0 - parts["lpips"])
        total = sum(self.weights[name] * term for name, term in terms.items())
        return item.score(total / sum(self.weights.values()), **parts)

    def measure_lpips(self, frames: npt.NDArray[np.uint8], reference: npt.NDArray[np.uint8]) -> float:
        import torch

        total = 0.0
        with torch.inference_mode():
            for start in range(0, len(frames), LPIPS_BATCH):  # the features of a whole clip would need much memory
                part = slice(start, start + LPIPS_BATCH)
                pair = (to_lpips_tensor(images[part], self.device) for images in (frames, reference))
                total += float(self._lpips(*pair).sum())
        return total / len(frames)
