"""Scores from another reward service with Cosmos-RL's HTTP protocol, such as a wfm_reward service with `http:`."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlencode

import numpy as np

from wfm_reward.base import UNBOUNDED, MediaBatch, MediaItem, Reward, RewardError, Score
from wfm_reward.http_client import HttpClient, HttpRequestError, HttpResponse, check_reply, check_url, pause

VARIABLE_PREFIXES = ("REMOTE_REWARD", "WFM_REWARD", "DIFFUSION_REWARD")  # of variables; the last two are old names
IGNORE_REPLICA_VARIABLE = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"
POLL_S = 0.5
FORM_HEADERS = {"Content-Type": "application/x-www-form-urlencoded"}
BINARY_HEADERS = {"Content-Type": "application/octet-stream"}


class Remote(Reward):
    """Score of a reward that another service computes. The option `reward` is the name of this reward.

    Set the addresses with the environment variables REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL and, if needed,
    REMOTE_REWARD_TOKEN. The prefix of these names can also be WFM_REWARD_ or DIFFUSION_REWARD_. `remote/NAME` is
    `remote` with the option `reward: NAME`, so that a recipe can use several remote rewards.
    """

    name = primary_output = "remote"
    media_types = frozenset({"image", "video"})
    outputs: ClassVar = {"remote": UNBOUNDED}
    label_option = "reward"
    stall_s = 660.0

    def __init__(
        self, device: str = "cpu", *, reward: str, output: str | None = None, timeout_s: float = 600.0, **options: Any
    ) -> None:
        """output: name of an output of the other service, or a sum such as vq_reward+mq_reward. None if there is only
        one output. timeout_s: timeout per batch, at most 600.

        Raises RewardError if an option is invalid.
        """
        super().__init__(device, **options)
        if not 0 < timeout_s <= 600:
            raise RewardError(f"reward remote: timeout_s is {timeout_s}; it must be in (0, 600]")
        self.reward, self.output, self.timeout_s = reward, output, timeout_s

    def load(self) -> None:
        """Read the addresses from environment variables. Raises RewardError if they are missing or differ."""
        self._enqueue_url, self._fetch_url, token = read_service_addresses(os.environ)
        self._client = HttpClient(token)
        self._keep_replica = os.environ.get(IGNORE_REPLICA_VARIABLE, "").lower() not in ("1", "true")

    def check_reachable(self) -> None:
        for url in read_service_addresses(os.environ)[:2]:
            check_reply(url, f"reward remote/{self.reward}")

    def score(self, batch: MediaBatch) -> list[Score]:
        deadline_s = min(time.monotonic() + self.timeout_s, self.deadline_s)
        try:
            reply = self._request_scores(enqueue_body(self.reward, batch), deadline_s)
        except HttpRequestError as error:
            return [item.fail(f"remote {self.reward}: {error}") for item in batch]
        return list(self._parse_scores(reply, batch))

    def _request_scores(self, body: bytes, deadline_s: float) -> Mapping[str, Any]:
        accepted = _require_ok(self._client.post(self._enqueue_url, body, BINARY_HEADERS, deadline_s))
        uuid, replica = accepted.get("uuid"), accepted.get("replica_id")
        if not isinstance(uuid, str):
            raise HttpRequestError(f"{self._enqueue_url} returned no uuid")
        target = {"X-Lepton-Replica-Target": str(replica)} if replica and self._keep_replica else {}
        form = urlencode({"uuid": uuid, "type": self.reward}).encode()
        while True:
            response = self._client.post(self._fetch_url, form, {**FORM_HEADERS, **target}, deadline_s)
            if response.status != 400:  # 400: not ready; Cosmos-RL's service also uses it for failed requests
                return _require_ok(response)
            if time.monotonic() + POLL_S >= deadline_s:
                raise HttpRequestError(f"no scores within {self.timeout_s:g} s: {response.body_excerpt()}")
            pause(POLL_S)

    def _parse_scores(self, reply: Mapping[str, Any], batch: MediaBatch) -> list[Score]:
        lists = reply.get("scores")
        if not isinstance(lists, dict) or not lists:
            raise RewardError(f"remote {self.reward}: the service returned no scores: {str(reply)[:200]}")
        numbers = {
            name: values
            for name, values in lists.items()
            if isinstance(values, list) and all(v is None or _is_number(v) for v in values)
        }
        short = [name for name, values in numbers.items() if len(values) != len(batch)]
        if short:
            raise RewardError(f"remote {self.reward}: {len(numbers[short[0]])} scores for {len(batch)} items")
        outputs = self._select_outputs(numbers)
        reasons = {
            f.get("index"): f.get("reason")
            for f in reply.get("failures", ())
            if isinstance(f, dict) and f.get("reason")
        }
        return [
            _item_score(item, {name: values[i] for name, values in numbers.items()}, outputs, reasons.get(i))
            for i, item in enumerate(batch)
        ]

    def _select_outputs(self, numbers: Mapping[str, Sequence[Any]]) -> list[str]:
        outputs = list(numbers) if self.output is None else [part.strip() for part in self.output.split("+")]
        if (self.output is None and len(outputs) != 1) or not set(outputs) <= numbers.keys():
            raise RewardError(
                f"remote {self.reward}: the service has the outputs {', '.join(numbers)}; set the option `output` to "
                "one of them, or to a sum such as a+b"
            )
        return outputs


def read_service_addresses(environment: Mapping[str, str]) -> tuple[str, str, str | None]:
    """Return (enqueue URL, fetch URL, token or None) from the environment variables of a reward service.

    The variables are P_ENQUEUE_URL, P_FETCH_URL and P_TOKEN, where P is one of VARIABLE_PREFIXES. Raises RewardError if
    both URLs are missing, only one is set, a URL is invalid, or the variables of two prefixes differ.
    """
    addresses = {}
    for family in VARIABLE_PREFIXES:
        enqueue, fetch, token = (
            environment.get(f"{family}_{key}") or None for key in ("ENQUEUE_URL", "FETCH_URL", "TOKEN")
        )
        if enqueue and fetch:
            addresses[family] = (
                check_url(enqueue, f"{family}_ENQUEUE_URL"),
                check_url(fetch, f"{family}_FETCH_URL"),
                token,
            )
        elif enqueue or fetch:
            missing, present = ("FETCH_URL", "ENQUEUE_URL") if enqueue else ("ENQUEUE_URL", "FETCH_URL")
            raise RewardError(f"reward remote: {family}_{present} is set, but not {family}_{missing}; set both or none")
    if not addresses:
        raise RewardError("reward remote: set REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL, REMOTE_REWARD_TOKEN")
    if len(set(addresses.values())) > 1:
        raise RewardError(f"reward remote: variables with the prefixes {' and '.join(addresses)} differ: unset one set")
    return next(iter(addresses.values()))


def enqueue_body(reward: str, batch: MediaBatch) -> bytes:
    """Return the body of the enqueue request: a line of JSON, then images [B,H,W,3] or videos [B,3,T,H,W] as .npy."""
    video = batch.media.ndim == 5
    fields: dict[str, Any] = {
        "prompts": list(batch.prompts),
        "reward_fn": {reward: 1.0},
        "media_type": "video" if video else "image",
        "metadata": [dict(metadata) for metadata in batch.metadata],
    }
    if video:
        fields["video_infos"] = [{} if batch.fps is None else {"video_fps": batch.fps}] * len(batch)
    if all("tag" in metadata and "include" in metadata for metadata in batch.metadata):
        fields["geneval_tags"] = [metadata["tag"] for metadata in batch.metadata]
        fields["geneval_includes"] = [json.dumps(metadata["include"]) for metadata in batch.metadata]
    media = np.ascontiguousarray(batch.media.transpose(0, 4, 1, 2, 3)) if video else batch.media
    array = io.BytesIO()
    np.save(array, media, allow_pickle=False)
    return json.dumps(fields).encode() + b"\n" + array.getvalue()


def _require_ok(response: HttpResponse) -> dict[str, Any]:
    if response.status != 200:
        raise HttpRequestError(f"a response with status {response.status}: {response.body_excerpt()}")
    return response.parse_json()


def _item_score(item: MediaItem, values: Mapping[str, Any], outputs: Sequence[str], reason: str | None) -> Score:
    missing = [name for name in outputs if values[name] is None or not math.isfinite(values[name])]
    if missing:
        return item.fail(reason or f"the service returned no {missing[0]} for this item")
    if item.fps is not None and all(value == -1.0 for value in values.values()):
        return item.fail("the service returned -1 for all outputs, its value for videos that it cannot score")
    parts = {name: float(v) for name, v in values.items() if v is not None and math.isfinite(v)}
    return item.score(sum(float(values[name]) for name in outputs), **parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
