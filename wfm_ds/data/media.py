"""Decoding of one medium, image or video, to the pixels that are trained on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wfm_ds.data.pixels import BadMedia, Draw, Framing, image_size, load_image
from wfm_ds.data.samples import IMAGE_SUFFIXES, Media
from wfm_ds.data.video import clip_frames as clip_frames
from wfm_ds.data.video import load_clip, video_size


def load_media(media: Media, framing: Framing, draw: Draw) -> npt.NDArray[np.uint8]:
    """Decode to uint8 [H,W,3] of an image, [F,H,W,3] of a video. Raises BadMedia.

    An image where a clip is wanted is `too_short`; where an image is wanted, a video gives one of its frames.
    """
    if media.suffix not in IMAGE_SUFFIXES:
        return load_clip(media, framing, draw)
    if framing.num_frames > 1:
        raise BadMedia("too_short", media.name, f"an image, a clip has {framing.num_frames} frames")
    return load_image(media, framing, draw)


def media_size(media: Media) -> tuple[int, int]:
    """Return height and width of an image or video, upright. Raises BadMedia."""
    return image_size(media) if media.suffix in IMAGE_SUFFIXES else video_size(media)
