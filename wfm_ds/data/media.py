"""Decoding of an image or video to training pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wfm_ds.data.pixels import BadMedia, Draw, Framing, image_size, load_image
from wfm_ds.data.samples import IMAGE_SUFFIXES, Media
from wfm_ds.data.video import clip_frames as clip_frames
from wfm_ds.data.video import load_clip, video_size


def load_media(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode to uint8 RGB: [H,W,3] for an image, [framing.num_frames,H,W,3] for a video.

    Raises BadMedia. If framing.num_frames is larger than 1, an image raises BadMedia with the reason `too_short`.
    """
    if media.suffix not in IMAGE_SUFFIXES:
        return load_clip(media, framing, draw)
    if framing.num_frames > 1:
        raise BadMedia("too_short", media.name, f"an image, but clips have {framing.num_frames} frames")
    return load_image(media, framing, draw)


def media_size(media: Media) -> tuple[int, int]:
    """Return height and width of an image or video after upright rotation. Raises BadMedia."""
    return image_size(media) if media.suffix in IMAGE_SUFFIXES else video_size(media)
