"""Cosmos-RL's reward protocol (github.com/nvidia-cosmos/cosmos-rl, reward_service): parse requests, build replies.

The body of an enqueue request is one line of JSON, a newline, and an array in .npy format. No I/O, no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.web.http_problem import check_encodable, invalid_request
from wfm_reward.web.npy import read_npy
from wfm_reward.web.score_request import ScoreRequest

MAX_LINE_BYTES = 4 * 2**20
MAX_ITEMS = 4096
LATENT_TYPE = "latent"


def parse_enqueue(body: memoryview) -> ScoreRequest:
    """Parse and validate an enqueue request. Raises HttpProblem.

    The key `media_type` is image for uint8 [B,H,W,3], video for uint8 [B,3,T,H,W], or latent (the default) for
    [B,C,T,h,w] in float16, float32, or bfloat16 viewed as uint8 with a doubled last axis. Other keys: prompts,
    reward_fn {name: weight} (only positive weights count), video_infos [{video_fps or fps}], geneval_tags,
    geneval_includes, and metadata, a map per item.
    """
    fields, rest = _split_first_line(body)
    array = read_npy(rest)
    kind = fields.get("media_type", LATENT_TYPE)
    media = _split_items(kind, array)
    prompts = fields.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise invalid_request("`prompts` must be a list of strings")
    if len(prompts) != len(media):
        raise invalid_request(f"{len(prompts)} prompts for {len(media)} items")
    return ScoreRequest(
        rewards=_parse_reward_names(fields.get("reward_fn")),
        prompts=prompts,
        metadata=_parse_metadata(fields, len(media)),
        fps=_parse_fps(fields.get("video_infos"), len(media), kind),
        media=media,
        latents=kind == LATENT_TYPE,
        info=_input_info(array, fields),
    )


def _split_first_line(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    line = bytes(body[:MAX_LINE_BYTES]).partition(b"\n")[0]
    if len(line) >= min(len(body), MAX_LINE_BYTES):
        raise invalid_request(f"no newline after the JSON within {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"the first line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid_request("the first line is not a JSON object")
    check_encodable(fields)
    return fields, body[len(line) + 1 :]


def _split_items(kind: Any, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Split the array into one array per item, in the layout of ScoreRequest."""
    if len(array.shape) > 0 and array.shape[0] > MAX_ITEMS:
        raise invalid_request(f"{array.shape[0]} items; send at most {MAX_ITEMS}")
    if kind == "image" and array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        return list(array)
    if kind == "video" and array.dtype == np.uint8 and array.ndim == 5 and array.shape[1] == 3:
        return [np.ascontiguousarray(item.transpose(1, 2, 3, 0)) for item in array]
    if kind == LATENT_TYPE and array.ndim == 5:
        return [widen_bfloat16(item) for item in array]
    shapes = "image uint8 [B,H,W,3], video uint8 [B,3,T,H,W], latent float16 or float32 [B,C,T,h,w]"
    raise invalid_request(f"media_type {str(kind)[:40]!r} with {array.dtype} {list(array.shape)}; send {shapes}")


def widen_bfloat16(latents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert latents that were sent as bytes of bfloat16 (uint8) to float32. Return other dtypes unchanged."""
    if latents.dtype != np.uint8:
        return latents
    if latents.shape[-1] % 2:
        raise invalid_request("latents of uint8 must be bfloat16 viewed as bytes, with a last axis of even length")
    halves = np.ascontiguousarray(latents).view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32)


def _parse_reward_names(weights: Any) -> tuple[str, ...]:
    if not isinstance(weights, dict) or not all(_is_number(w) for w in weights.values()):
        raise invalid_request("`reward_fn` must be a map from reward names to weights")
    names = tuple(name for name, weight in weights.items() if weight > 0)
    if not names:
        raise invalid_request("`reward_fn` has no reward with a weight above 0")
    return names


def _parse_metadata(fields: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    maps = fields.get("metadata", [{}] * count)
    if not isinstance(maps, list) or len(maps) != count or not all(isinstance(m, dict) for m in maps):
        raise invalid_request(f"`metadata` must be a list of {count} maps")
    metadata = [dict(m) for m in maps]
    for key, name in (("geneval_tags", "tag"), ("geneval_includes", "include")):
        values = fields.get(key)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            raise invalid_request(f"`{key}` must be a list of {count} values")
        for item_metadata, value in zip(metadata, values, strict=True):
            item_metadata.setdefault(
                name, _parse_include(value) if name == "include" and isinstance(value, str) else value
            )
    return metadata


def _parse_include(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"`geneval_includes` is not JSON: {error}") from error


def _parse_fps(infos: Any, count: int, kind: str) -> list[float | None]:
    if infos is None or kind == "image":
        return [None] * count
    if not isinstance(infos, list) or len(infos) != count or not all(isinstance(i, dict) for i in infos):
        raise invalid_request(f"`video_infos` must be a list of {count} maps")
    rates = [info.get("video_fps", info.get("fps")) for info in infos]
    if not all(fps is None or (_is_number(fps) and 0 < fps < 1e6) for fps in rates):
        raise invalid_request("`video_infos`: video_fps must be frames per second")
    return [None if fps is None else float(fps) for fps in rates]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    """Build the reply to a pull. Its `scores` has one list per output of the reward, in item order.

    `scores`: (value, failure, parts) per item, from the workers. Failed items get `failed_value` in every list and
    their reason in `failures`.
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
    reply = {
        "scores": lists,
        "input_info": dict(info),
        "duration": f"{seconds:.2f}",
        "decoded_duration": f"{decode_seconds:.2f}",
        "type": reward,
    }
    return {**reply, "failures": failures} if failures else reply
