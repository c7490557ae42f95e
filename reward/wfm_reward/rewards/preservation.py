"""Similarity of an edited image to its source, outside the mask."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from wfm_ds.types import MASK
from wfm_reward.base import ItemReward, MediaItem, Range, RewardError, Score
from wfm_reward.rewards._weights import load_lpips, to_lpips_tensor
from wfm_reward.similarity import GAUSSIAN_RADIUS, MAX_PSNR_DB, frame_psnr, gaussian_ssim_map

Measure = Literal["psnr", "ssim", "lpips"]
Image = npt.NDArray[np.uint8]
Pixels = npt.NDArray[np.bool_]

FULL_AT: dict[Measure, float] = {"psnr": 30.0, "ssim": 1.0, "lpips": 0.0}
MASK_THRESHOLD = 128  # mean of R, G and B from which a pixel of the mask is bright


class Preservation(ItemReward):
    """Similarity of a sample to its source, 0 to 1, outside the mask: where the mask is dark, nothing may change.

    `measure: psnr` scores PSNR / `full_at`, limited to 1. `ssim` scores SSIM / `full_at` (Gaussian windows of 11 x 11
    pixels), limited to 0 and 1. `lpips` scores (1 - LPIPS) / (1 - `full_at`), limited to 0 and 1. Changes inside the
    mask never count. Without a mask, a sample fails, unless `whole: true` compares the whole image. The reward also
    reports the measure itself: `psnr_db`, `ssim` or `lpips`.
    """

    name = primary_output = "preservation"
    media_types = frozenset({"image"})
    outputs: ClassVar = {
        "preservation": Range(0.0, 1.0),
        "psnr_db": Range(0.0, MAX_PSNR_DB),
        "ssim": Range(-1.001, 1.001),  # rounding can exceed 1
        "lpips": Range(0.0, float("inf")),
    }
    sees_images = True

    def __init__(
        self,
        device: str = "cpu",
        *,
        measure: Measure = "psnr",
        full_at: float | None = None,
        whole: bool = False,
        net: str = "alex",
        **options: str,
    ) -> None:
        """measure: psnr, ssim or lpips. full_at: value of the measure at which the score reaches 1; None: 30 dB,
        SSIM 1 or LPIPS 0. whole: compare the whole image if there is no mask. net: network of LPIPS: alex, vgg or
        squeeze.

        Raises RewardError if an option is invalid.
        """
        super().__init__(device, **options)
        if measure not in get_args(Measure):
            raise RewardError(f"reward {self.name}: measure is {measure!r}; it must be psnr, ssim or lpips")
        full = FULL_AT[measure] if full_at is None else full_at
        good = 0 <= full < 1 if measure == "lpips" else 0 < full <= (MAX_PSNR_DB if measure == "psnr" else 1)
        if not good:
            limits = {"psnr": f"above 0 and at most {MAX_PSNR_DB:g} dB", "ssim": "above 0 and at most 1"}
            raise RewardError(
                f"reward {self.name}: full_at is {full:g}; for {measure} it must be "
                + limits.get(measure, "at least 0 and below 1")
            )
        self.measure, self.full_at, self.needs_mask, self.net = measure, full, not whole, net

    def load(self) -> None:
        if self.measure == "lpips":
            self._lpips = load_lpips(self.name, self.net, self.device, spatial=True)

    def score_item(self, item: MediaItem) -> Score:
        sample = item.frames[0]
        try:
            source = find_source(item)
            value = self.compare(sample, source, self.find_kept_pixels(item))
        except ValueError as error:
            return item.fail(str(error))
        if self.measure == "psnr":
            return item.score(min(1.0, value / self.full_at), psnr_db=value)
        if self.measure == "ssim":
            return item.score(float(np.clip(value / self.full_at, 0, 1)), ssim=value)
        return item.score(float(np.clip((1 - value) / (1 - self.full_at), 0, 1)), lpips=value)

    def find_kept_pixels(self, item: MediaItem) -> Pixels:
        """Return the pixels [H,W] that may not change. Raises ValueError for a missing mask, or if there are none."""
        size, mask = item.frames.shape[1:3], item.images.get(MASK)
        if mask is None and self.needs_mask:
            raise ValueError("the sample has no mask: add it to data.reward_inputs, or set the option whole: true")
        if mask is None:
            return np.ones(size, np.bool_)
        if mask.shape[:2] != size:
            raise ValueError(f"the mask has size {list(mask.shape[:2])}, the sample {list(size)}")
        kept: Pixels = mask.sum(axis=-1, dtype=np.int32) < 3 * MASK_THRESHOLD
        if not kept.any():
            raise ValueError("the mask is bright everywhere, so no pixel has to stay")
        return kept

    def compare(self, sample: Image, source: Image, kept: Pixels) -> float:
        """Return the measure of two images [H,W,3] over the pixels `kept` [H,W].

        Raises ValueError if no SSIM window is centred on such a pixel.
        """
        if self.measure == "psnr":
            return frame_psnr(sample[kept], source[kept])
        sample = np.where(kept[..., None], sample, source)  # changes inside the mask must not reach windows outside
        if self.measure == "lpips":
            import torch

            with torch.inference_mode():
                pair = (to_lpips_tensor(image[None], self.device) for image in (sample, source))
                distances = self._lpips(*pair)[0, 0].cpu().numpy()
            return float(distances[kept].mean())
        similarity = gaussian_ssim_map(sample, source)
        inside = kept[GAUSSIAN_RADIUS:-GAUSSIAN_RADIUS, GAUSSIAN_RADIUS:-GAUSSIAN_RADIUS]
        if not inside.any():
            raise ValueError("the mask leaves only pixels near the border, where SSIM has no complete window")
        return float(similarity[inside].mean())


def find_source(item: MediaItem) -> Image:
    """Return the source [H,W,3] of an edited image. Raises ValueError if it is missing or has another size."""
    source = item.images.get("source")
    if source is None:
        raise ValueError("the sample has no source image")
    if source.shape != item.frames.shape[1:]:
        raise ValueError(f"the source has shape {list(source.shape)}, the sample {list(item.frames.shape[1:])}")
    return source
