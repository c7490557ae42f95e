"""JSON protocol of POST /compute: prompts and base64 images or videos in, scores out."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from wfm_reward.web.requests import (
    MAX_ITEMS,
    HttpProblem,
    ScoreRequest,
    check_length,
    invalid_request,
    parse_fields,
    parse_json,
    unreadable_input,
)

ReserveBytes: TypeAlias = Callable[[int], None]

MAX_VALUES = 500_000  # in the JSON, counted by its delimiters: an empty list has two bytes in JSON but 64 in memory
# Only self-contained formats: some FFmpeg demuxers open other files (ffconcat) or sockets (sdp).
AV_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif"}


class ComputeFields(BaseModel):
    """The JSON of a request. Each list has one value per item."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS)]
    rewards: Annotated[list[str], Field(min_length=1)]
    image: list[str] | None = None
    """Base64 PNG, JPEG or WebP."""
    video: list[str | list[str]] | None = None
    """For each item: a list of base64 images, or a base64 MP4, WebM, Matroska or GIF."""
    metadata: list[dict[str, Any]] | None = None
    fps: Annotated[float, Field(gt=0, lt=1e6)] | None = None
    timeout_s: Annotated[float, Field(gt=0, lt=1e6)] | None = None


def parse_compute(body: memoryview, reserve: ReserveBytes) -> tuple[ScoreRequest, float | None]:
    """Return (request, its time limit in seconds or None). Raises HttpProblem for an invalid request.

    reserve: function that is called with the size of each decoded array before its allocation, and may raise an error.
    """
    text = bytes(body)
    if sum(text.count(delimiter) for delimiter in (b",", b"[", b"{")) > MAX_VALUES:
        raise invalid_request(f"more than {MAX_VALUES} values: send fewer items in one request")
    fields = parse_fields(ComputeFields, parse_json(text, "the body"))
    count = len(fields.prompt)
    metadata = fields.metadata or [{} for _ in range(count)]
    check_length("metadata", metadata, count)
    media: list[npt.NDArray[Any]]
    if fields.image is not None and fields.video is None:
        check_length("image", fields.image, count)
        media = [decode_image(item, reserve) for item in fields.image]
    elif fields.video is not None and fields.image is None:
        check_length("video", fields.video, count)
        media = [decode_video(item, reserve) for item in fields.video]
    else:
        raise invalid_request("send `image` or `video`")
    request = ScoreRequest(
        rewards=tuple(dict.fromkeys(fields.rewards)),
        prompts=fields.prompt,
        metadata=metadata,
        fps=[None if fields.video is None else fields.fps] * count,
        media=media,
        latents=False,
        info={},
    )
    return request, fields.timeout_s


def decode_image(text: str, reserve: ReserveBytes) -> npt.NDArray[np.uint8]:
    """Decode a base64 image to uint8 [H,W,3]. Raises HttpProblem if it is invalid."""
    from PIL import Image

    data = _decode_base64(text)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            reserve(image.width * image.height * 3)  # only the header has been read so far
            return np.asarray(image.convert("RGB"))
    except HttpProblem:
        raise
    except Exception as error:
        raise unreadable_input("an image", error) from error


def decode_video(item: str | list[str], reserve: ReserveBytes) -> npt.NDArray[np.uint8]:
    """Decode a list of base64 images or a base64 video file to uint8 [T,H,W,3]. Raises HttpProblem if it is invalid."""
    if isinstance(item, str):
        return _decode_video_file(_decode_base64(item), reserve)
    if not item:
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
        raise unreadable_input("a video", error) from error
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise invalid_request("a video needs at least one frame, and all frames must have the same size")
    return np.stack(frames)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise invalid_request(f"images and videos must be base64: {error}") from error


def compute_reply(scores: Mapping[str, Sequence[tuple[float | None, str | None, Any]]]) -> dict[str, Any]:
    """Return the reply. Its `scores` has the values of all rewards, `rewards` only the values of the first reward.

    scores: {reward: (value, failure reason, parts) of each item}.
    """
    values = {name: [value for value, _, _ in items] for name, items in scores.items()}
    failures = [
        {"reward": name, "index": i, "reason": failure}
        for name, items in scores.items()
        for i, (_, failure, _) in enumerate(items)
        if failure is not None
    ]
    return {"rewards": next(iter(values.values())), "scores": values, "failures": failures}
