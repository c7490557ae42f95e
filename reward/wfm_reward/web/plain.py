"""Plain JSON for POST /compute: prompts and base64 media in, scores out. Pure: no socket, no state."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.web.problem import malformed
from wfm_reward.web.request import ScoreRequest

KEYS = {"prompt", "image", "video", "rewards", "metadata", "fps", "timeout_s"}


def parse_compute(body: memoryview, max_bytes: int) -> tuple[ScoreRequest, float | None]:
    """The request, and its own time limit. `image`: base64 PNG or JPEG, one an item; or `video`: a list of such frames,
    or base64 MP4, one an item. Decoded media may take `max_bytes` in all. Raises Problem."""
    fields = _fields(body)
    prompts, images, videos = fields.get("prompt"), fields.get("image"), fields.get("video")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise malformed("`prompt` must be a list of texts")
    if (images is None) == (videos is None):
        raise malformed("send `image` or `video`")
    given = images if videos is None else videos
    if not isinstance(given, list) or len(given) != len(prompts):
        raise malformed(f"`{'image' if videos is None else 'video'}` must be a list of {len(prompts)}")
    rewards, metadata = fields.get("rewards"), fields.get("metadata") or [{}] * len(prompts)
    if not isinstance(rewards, list) or not rewards or not all(isinstance(r, str) for r in rewards):
        raise malformed("`rewards` must be a list of names")
    if (
        not isinstance(metadata, list)
        or len(metadata) != len(prompts)
        or not all(isinstance(m, dict) for m in metadata)
    ):
        raise malformed(f"`metadata` must be a list of {len(prompts)} maps")
    fps, timeout_s = (_positive(fields, key) for key in ("fps", "timeout_s"))
    budget = _Budget(max_bytes)
    media = [decode_image(item, budget) if videos is None else decode_video(item, budget) for item in given]
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


class _Budget:
    """Bytes that decoded media may still take: asked before they are allocated."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise malformed("the decoded media are larger than this service takes at once: send fewer in a request")


def decode_image(text: Any, budget: _Budget) -> npt.NDArray[np.uint8]:
    """uint8 [H,W,3]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(_bytes(text)), formats=("PNG", "JPEG", "WEBP")) as image:
            budget.take(image.width * image.height * 3)  # only the header has been read
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise malformed(f"an image cannot be read: {str(error)[:100]}") from error


def decode_video(item: Any, budget: _Budget) -> npt.NDArray[np.uint8]:
    """uint8 [T,H,W,3], of a list of images or of one video file."""
    if isinstance(item, str):
        return _decode_file(_bytes(item), budget)
    if not isinstance(item, list) or not item:
        raise malformed("a video is a list of base64 images, or one base64 file")
    frames = [decode_image(frame, budget) for frame in item]
    if len({frame.shape for frame in frames}) > 1:
        raise malformed("the frames of a video must have one size")
    return np.stack(frames)


def _decode_file(data: bytes, budget: _Budget) -> npt.NDArray[np.uint8]:
    import av

    frames = []
    try:
        with av.open(io.BytesIO(data), mode="r") as container:
            for frame in container.decode(video=0):
                budget.take(frame.width * frame.height * 3)
                frames.append(frame.to_ndarray(format="rgb24"))
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise malformed(f"a video cannot be read: {str(error)[:100]}") from error
    if not frames or len({frame.shape for frame in frames}) > 1:
        raise malformed("a video needs frames, of one size")
    return np.stack(frames)


def _fields(body: memoryview) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(fields, dict) or fields.keys() - KEYS:
        raise malformed(f"the body must be a JSON object of {', '.join(sorted(KEYS))}")
    return fields


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error, ValueError) as error:
        raise malformed(f"media must be base64: {error}") from error


def _positive(fields: dict[str, Any], key: str) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise malformed(f"`{key}` must be a number above 0")
    return float(value)


def compute_answer(
    rewards: Sequence[str], scores: dict[str, list[tuple[float | None, str | None, dict[str, float]]]]
) -> dict[str, Any]:
    """`rewards`: the values of the first reward, as Flow-Factory's remote reward reads them; `scores`: of all."""
    values = {name: [value for value, _, _ in scores[name]] for name in rewards}
    failures = [
        {"reward": name, "index": i, "reason": failure}
        for name in rewards
        for i, (_, failure, _) in enumerate(scores[name])
        if failure is not None
    ]
    return {"rewards": values[rewards[0]], "scores": values, "failures": failures}
