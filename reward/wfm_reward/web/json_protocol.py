"""JSON protocol of POST /compute: prompts and base64 images or videos in, scores out. No I/O, no state."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from wfm_reward.web.http_problem import HttpProblem, check_encodable, invalid_request
from wfm_reward.web.score_request import ScoreRequest

ReserveBytes: TypeAlias = Callable[[int], None]

REQUEST_KEYS = {"prompt", "image", "video", "rewards", "metadata", "fps", "timeout_s"}
MAX_ITEMS = 4096
MAX_VALUES = 500_000  # in the JSON, counted by its delimiters: an empty list has two bytes in JSON but 64 in memory
# Only self-contained formats: some FFmpeg demuxers open other files (ffconcat) or sockets (sdp).
AV_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif"}


def parse_compute(body: memoryview, reserve: ReserveBytes) -> tuple[ScoreRequest, float | None]:
    """Parse a request. Returns it with its time limit in seconds, or None if it has no limit.

    Fields: `image` is one base64 PNG, JPEG or WebP per item; `video` is, per item, a list of such images or a base64
    MP4, WebM, Matroska or GIF.

    `reserve`: function that is called with the size of each decoded array before the array is allocated.

    Raises HttpProblem, and any exception of `reserve`.
    """
    fields = _parse_fields(body)
    prompts, images, videos = fields.get("prompt"), fields.get("image"), fields.get("video")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise invalid_request("`prompt` must be a list of strings")
    if len(prompts) > MAX_ITEMS:
        raise invalid_request(f"{len(prompts)} prompts; send at most {MAX_ITEMS}")
    if (images is None) == (videos is None):
        raise invalid_request("send `image` or `video`")
    encoded = images if videos is None else videos
    if not isinstance(encoded, list) or len(encoded) != len(prompts):
        raise invalid_request(f"`{'image' if videos is None else 'video'}` must be a list of {len(prompts)} values")
    rewards, metadata = fields.get("rewards"), fields.get("metadata") or [{}] * len(prompts)
    if not isinstance(rewards, list) or not rewards or not all(isinstance(r, str) for r in rewards):
        raise invalid_request("`rewards` must be a list of names")
    if (
        not isinstance(metadata, list)
        or len(metadata) != len(prompts)
        or not all(isinstance(m, dict) for m in metadata)
    ):
        raise invalid_request(f"`metadata` must be a list of {len(prompts)} maps")
    check_encodable(prompts, metadata, rewards)
    fps, timeout_s = (_parse_positive(fields, key) for key in ("fps", "timeout_s"))
    media = [decode_image(item, reserve) if videos is None else decode_video(item, reserve) for item in encoded]
    request = ScoreRequest(
        rewards=tuple(dict.fromkeys(rewards)),
        prompts=prompts,
        metadata=metadata,
        fps=[None if videos is None else fps] * len(prompts),
        media=media,
        latents=False,
        info={},
    )
    return request, timeout_s


def decode_image(text: Any, reserve: ReserveBytes) -> npt.NDArray[np.uint8]:
    """Decode a base64 image to uint8 [H,W,3]. Raises HttpProblem."""
    from PIL import Image

    data = _decode_base64(text)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            reserve(image.width * image.height * 3)  # only the header has been read so far
            return np.asarray(image.convert("RGB"))
    except HttpProblem:
        raise
    except Exception as error:
        raise _unreadable_media("an image", error) from error


def decode_video(item: Any, reserve: ReserveBytes) -> npt.NDArray[np.uint8]:
    """Decode a list of base64 images or a base64 video file to uint8 [T,H,W,3]. Raises HttpProblem."""
    if isinstance(item, str):
        return _decode_video_file(_decode_base64(item), reserve)
    if not isinstance(item, list) or not item:
        raise invalid_request("a video must be a list of base64 images or one base64 file")
    frames = [decode_image(frame, reserve) for frame in item]
    if len({frame.shape for frame in frames}) > 1:
        raise invalid_request("all frames of a video must have the same size")
    return np.stack(frames)


def _decode_video_file(data: bytes, reserve: ReserveBytes) -> npt.NDArray[np.uint8]:
    import av

    frames = []
    try:
        with av.open(io.BytesIO(data), mode="r", options=AV_OPTIONS, metadata_errors="ignore") as container:
            for frame in container.decode(video=0):
                reserve(frame.width * frame.height * 3)
                frames.append(frame.to_ndarray(format="rgb24"))
    except HttpProblem:
        raise
    except Exception as error:
        raise _unreadable_media("a video", error) from error
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise invalid_request("a video needs at least one frame, and all frames must have the same size")
    return np.stack(frames)


def _unreadable_media(label: str, error: Exception) -> HttpProblem:
    return invalid_request(f"{label} cannot be read: {' '.join(str(error).split())[:100] or type(error).__name__}")


def _parse_fields(body: memoryview) -> dict[str, Any]:
    text = bytes(body)
    if sum(text.count(delimiter) for delimiter in (b",", b"[", b"{")) > MAX_VALUES:
        raise invalid_request(f"more than {MAX_VALUES} values: send fewer items in one request")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(fields, dict) or fields.keys() - REQUEST_KEYS:
        raise invalid_request(f"the body must be a JSON object with the keys {', '.join(sorted(REQUEST_KEYS))}")
    return fields


def _decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise invalid_request(f"images and videos must be base64: {error}") from error


def _parse_positive(fields: dict[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise invalid_request(f"`{key}` must be a number above 0")
    return float(value)


def compute_reply(
    rewards: Sequence[str], scores: dict[str, list[tuple[float | None, str | None, dict[str, float]]]]
) -> dict[str, Any]:
    """Build the reply.

    Its field `rewards` has the values of the first reward (for Flow-Factory), its field `scores` those of all rewards.
    """
    values = {name: [value for value, _, _ in scores[name]] for name in rewards}
    failures = [
        {"reward": name, "index": i, "reason": failure}
        for name in rewards
        for i, (_, failure, _) in enumerate(scores[name])
        if failure is not None
    ]
    return {"rewards": values[rewards[0]], "scores": values, "failures": failures}
