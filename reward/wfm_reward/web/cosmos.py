"""The bodies of Cosmos-RL's reward protocol (github.com/nvidia-cosmos/cosmos-rl, reward_service): bytes <-> requests.

An enqueue is one line of JSON, a newline, and an array as numpy.save writes it. Pure: no socket, no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.web.npy import read_npy
from wfm_reward.web.problem import check_encodable, malformed
from wfm_reward.web.request import ScoreRequest

LINE_BYTES = 4 * 2**20
MAX_ITEMS = 4096
LATENTS = "latent"


def parse_enqueue(body: memoryview) -> ScoreRequest:
    """Return the checked request. Raises HttpProblem.

    `media_type`: image uint8 [B,H,W,3], video uint8 [B,3,T,H,W], or latent (also where it is absent) float16, float32,
    or bfloat16 seen as uint8 with the last axis doubled, [B,C,T,h,w].
    Other keys: prompts, reward_fn {name: weight} of which those above 0 count, video_infos [{video_fps or fps}],
    geneval_tags, geneval_includes, and metadata, a map for each item.
    """
    fields, rest = _first_line(body)
    array = read_npy(rest)
    kind = fields.get("media_type", LATENTS)
    media = _items(kind, array)
    prompts = fields.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise malformed("`prompts` must be a list of texts")
    if len(prompts) != len(media):
        raise malformed(f"{len(prompts)} prompts for {len(media)} items")
    return ScoreRequest(
        rewards=_wanted(fields.get("reward_fn")),
        prompts=prompts,
        metadata=_metadata(fields, len(media)),
        fps=_fps(fields.get("video_infos"), len(media), kind),
        media=media,
        latents=kind == LATENTS,
        info=_info(array, fields),
    )


def _first_line(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    line = bytes(body[:LINE_BYTES]).partition(b"\n")[0]
    if len(line) >= min(len(body), LINE_BYTES):
        raise malformed(f"no newline after the JSON, within {LINE_BYTES} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the first line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise malformed("the first line is not a JSON object")
    check_encodable(fields)
    return fields, body[len(line) + 1 :]


def _items(kind: Any, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """One array an item, in the layout of ScoreRequest."""
    if len(array.shape) > 0 and array.shape[0] > MAX_ITEMS:
        raise malformed(f"{array.shape[0]} items; send {MAX_ITEMS} at most")
    if kind == "image" and array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
        return list(array)
    if kind == "video" and array.dtype == np.uint8 and array.ndim == 5 and array.shape[1] == 3:
        return [np.ascontiguousarray(item.transpose(1, 2, 3, 0)) for item in array]
    if kind == LATENTS and array.ndim == 5:
        return [as_float(item) for item in array]
    shapes = "image uint8 [B,H,W,3], video uint8 [B,3,T,H,W], latent float16 or float32 [B,C,T,h,w]"
    raise malformed(f"media_type {str(kind)[:40]!r} with {array.dtype} {list(array.shape)}; send {shapes}")


def as_float(latents: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Latents that came as the bytes of bfloat16 are widened to float32; others stay what they are."""
    if latents.dtype != np.uint8:
        return latents
    if latents.shape[-1] % 2:
        raise malformed("latents of uint8 are bfloat16 seen as bytes: the last axis has an even length")
    halves = np.ascontiguousarray(latents).view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32)


def _wanted(weights: Any) -> tuple[str, ...]:
    if not isinstance(weights, dict) or not all(_is_number(w) for w in weights.values()):
        raise malformed("`reward_fn` must be a map from reward names to weights")
    wanted = tuple(name for name, weight in weights.items() if weight > 0)
    if not wanted:
        raise malformed("`reward_fn` names no reward with a weight above 0")
    return wanted


def _metadata(fields: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    given = fields.get("metadata", [{}] * count)
    if not isinstance(given, list) or len(given) != count or not all(isinstance(m, dict) for m in given):
        raise malformed(f"`metadata` must be a list of {count} maps")
    metadata = [dict(one) for one in given]
    for key, name in (("geneval_tags", "tag"), ("geneval_includes", "include")):
        values = fields.get(key)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != count:
            raise malformed(f"`{key}` must be a list of {count}")
        for one, value in zip(metadata, values, strict=True):
            one.setdefault(name, _loaded(value) if name == "include" and isinstance(value, str) else value)
    return metadata


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed(f"`geneval_includes` is not JSON: {error}") from error


def _fps(infos: Any, count: int, kind: str) -> list[float | None]:
    if infos is None or kind == "image":
        return [None] * count
    if not isinstance(infos, list) or len(infos) != count or not all(isinstance(i, dict) for i in infos):
        raise malformed(f"`video_infos` must be a list of {count} maps")
    speeds = [info.get("video_fps", info.get("fps")) for info in infos]
    if not all(fps is None or (_is_number(fps) and 0 < fps < 1e6) for fps in speeds):
        raise malformed("`video_infos`: video_fps must be frames per second")
    return [None if fps is None else float(fps) for fps in speeds]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _info(array: npt.NDArray[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    info: dict[str, Any] = {
        "shape": list(array.shape),
        "dtype": f"torch.{array.dtype}",
        "min": f"{float(array.min()):.3f}",
        "max": f"{float(array.max()):.3f}",
    }
    if "video_infos" in fields:
        info["video_infos"] = fields["video_infos"]
    return info


def pull_answer(
    reward: str,
    primary: str,
    scores: Sequence[tuple[float | None, str | None, Mapping[str, float]]],
    *,
    info: Mapping[str, Any],
    seconds: float,
    decode_seconds: float,
    failed_value: float | None,
) -> dict[str, Any]:
    """The answer to a pull: `scores` has a list for every output of the reward, in the items' order.

    `scores` as the workers send them: (value, failure, parts). An item that failed has `failed_value` in every list and
    its reason in `failures`.
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
    answer = {
        "scores": lists,
        "input_info": dict(info),
        "duration": f"{seconds:.2f}",
        "decoded_duration": f"{decode_seconds:.2f}",
        "type": reward,
    }
    return {**answer, "failures": failures} if failures else answer
