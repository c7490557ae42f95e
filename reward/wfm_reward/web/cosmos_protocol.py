"""Cosmos-RL's reward protocol (github.com/nvidia-cosmos/cosmos-rl, reward_service): parse requests, build replies.

The body of an enqueue request is one line of JSON, a newline, and an array in .npy format.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

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

MAX_LINE_BYTES = 4 * 2**20
LATENT_TYPE = "latent"
NPY_MAGIC = b"\x93NUMPY"
NPY_HEADER_BYTES = 4096
MAX_DIMENSIONS = 6
DTYPES = ("uint8", "float16", "float32")

FramesPerSecond = Annotated[float, Field(gt=0, lt=1e6)]


class VideoInfo(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    video_fps: FramesPerSecond | None = None
    fps: FramesPerSecond | None = None


class EnqueueFields(BaseModel):
    """The JSON line of an enqueue request. Each list has one value per item."""

    model_config = ConfigDict(strict=True)

    prompts: list[str]
    reward_fn: dict[str, float]
    """{reward name: weight}; only rewards with a positive weight are computed."""
    media_type: str = LATENT_TYPE
    """Type of the array. image: uint8 [B,H,W,3]. video: uint8 [B,3,T,H,W]. latent: [B,C,T,h,w] as float16, float32, or
    bfloat16. The bytes of bfloat16 are sent as uint8 with a last axis of twice the length."""
    metadata: list[dict[str, Any]] | None = None
    video_infos: list[VideoInfo] | None = None
    geneval_tags: list[Any] | None = None
    geneval_includes: list[Any] | None = None


def parse_enqueue(body: memoryview) -> ScoreRequest:
    line = bytes(body[:MAX_LINE_BYTES]).partition(b"\n")[0]
    if len(line) >= min(len(body), MAX_LINE_BYTES):
        raise invalid_request(f"no newline after the JSON within {MAX_LINE_BYTES} bytes")
    content = parse_json(line, "the first line")
    fields = parse_fields(EnqueueFields, content)
    array = read_npy(body[len(line) + 1 :])
    media = _split_items(fields.media_type, array)
    check_length("prompts", fields.prompts, len(media))
    rewards = tuple(name for name, weight in fields.reward_fn.items() if weight > 0)
    if not rewards:
        raise invalid_request("`reward_fn` has no reward with a weight above 0")
    infos = fields.video_infos if fields.media_type != "image" and fields.video_infos is not None else None
    if infos is not None:
        check_length("video_infos", infos, len(media))
    return ScoreRequest(
        rewards=rewards,
        prompts=fields.prompts,
        metadata=_parse_metadata(fields, len(media)),
        fps=[None] * len(media) if infos is None else [info.video_fps or info.fps for info in infos],
        media=media,
        latents=fields.media_type == LATENT_TYPE,
        info=_input_info(array, content),
    )


def read_npy(data: memoryview) -> npt.NDArray[Any]:
    """Return the array in .npy data as a view, without trusting its header and without pickle.

    Raises HttpProblem with status 415 if the data is not .npy. The status is 422 for object arrays, dtypes outside
    DTYPES, Fortran order, or a size that does not match the header.
    """
    if bytes(data[: len(NPY_MAGIC)]) != NPY_MAGIC:
        hint = " (this looks like torch.save)" if bytes(data[:2]) in (b"PK", b"\x80\x02") else ""
        raise HttpProblem(415, "not_npy", f"the body after the first line is not .npy{hint}: write it with numpy.save")
    head = io.BytesIO(data[: NPY_HEADER_BYTES + 16])
    try:
        version = np.lib.format.read_magic(head)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(head, max_header_size=NPY_HEADER_BYTES)
    except Exception as error:
        raise unreadable_input("the .npy header", error) from error
    if dtype.hasobject or dtype.name not in DTYPES or not dtype.isnative:
        raise invalid_request(f"an array of {str(dtype)[:40]}; send one of {', '.join(DTYPES)}, little endian")
    if fortran or len(shape) > MAX_DIMENSIONS or not all(0 < n < 2**31 for n in shape):
        raise invalid_request(f"an array of shape {str(shape)[:80]}; send C order and at most {MAX_DIMENSIONS} axes")
    expected, actual = math.prod(shape) * dtype.itemsize, len(data) - head.tell()
    if expected != actual:
        raise invalid_request(
            f"{actual} bytes of data, but {dtype.name} {list(shape)} has {expected}: the body is cut off or too long"
        )
    return np.frombuffer(data[head.tell() :], dtype=dtype).reshape(shape)


def _split_items(kind: str, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    if len(array.shape) > 0 and array.shape[0] > MAX_ITEMS:
        raise invalid_request(f"{array.shape[0]} items; send at most {MAX_ITEMS}")
    if kind == "image" and array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        return list(array)
    if kind == "video" and array.dtype == np.uint8 and array.ndim == 5 and array.shape[1] == 3:
        return [np.ascontiguousarray(item.transpose(1, 2, 3, 0)) for item in array]
    if kind == LATENT_TYPE and array.ndim == 5:
        return [widen_bfloat16(item) for item in array]
    shapes = "image uint8 [B,H,W,3], video uint8 [B,3,T,H,W], latent float16 or float32 [B,C,T,h,w]"
    raise invalid_request(f"media_type {kind[:40]!r} with {array.dtype} {list(array.shape)}; send {shapes}")


def widen_bfloat16(latents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert latents that were sent as bytes of bfloat16 (uint8) to float32. Return other dtypes unchanged."""
    if latents.dtype != np.uint8:
        return latents
    if latents.shape[-1] % 2:
        raise invalid_request("latents of uint8 must be bfloat16 viewed as bytes, with a last axis of even length")
    halves = np.ascontiguousarray(latents).view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32)


def _parse_metadata(fields: EnqueueFields, count: int) -> list[dict[str, Any]]:
    metadata = [{} for _ in range(count)] if fields.metadata is None else fields.metadata
    check_length("metadata", metadata, count)
    for name, values in (("tag", fields.geneval_tags), ("include", fields.geneval_includes)):
        if values is None:
            continue
        check_length(f"geneval_{name}s", values, count)
        for item_metadata, value in zip(metadata, values, strict=True):
            is_text = name == "include" and isinstance(value, str)
            item_metadata.setdefault(name, parse_json(value, "`geneval_includes`") if is_text else value)
    return metadata


def _input_info(array: npt.NDArray[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "shape": list(array.shape),
        "dtype": f"torch.{array.dtype}",
        "min": f"{float(array.min()):.3f}",
        "max": f"{float(array.max()):.3f}",
    }
    if "video_infos" in fields:
        info["video_infos"] = fields["video_infos"]
    return info


def pull_reply(
    reward: str,
    primary: str,
    scores: Sequence[tuple[float | None, str | None, Mapping[str, float]]],
    *,
    info: Mapping[str, Any],
    seconds: float,
    decode_seconds: float,
    failed_value: float | None,
) -> dict[str, Any]:
    """Return the reply to a pull request. Its `scores` has one list per output of the reward, in item order.

    scores: (value, failure reason, parts) per item. A failed item has `failed_value` in every list, and an entry in
    `failures`.
    """
    outputs = [primary, *sorted({part for _, _, parts in scores for part in parts} - {primary})]
    lists = {
        output: [
            failed_value if value is None else (value if output == primary else parts.get(output))
            for value, _, parts in scores
        ]
        for output in outputs
    }
    failures = [{"index": i, "reason": failure} for i, (_, failure, _) in enumerate(scores) if failure is not None]
    return {
        "scores": lists,
        "input_info": dict(info),
        "duration": f"{seconds:.2f}",
        "decoded_duration": f"{decode_seconds:.2f}",
        "type": reward,
        **({"failures": failures} if failures else {}),
    }
