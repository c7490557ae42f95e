"""Scores of another reward service that speaks Cosmos-RL's protocol: its own, or ours with an HTTP port."""

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

from wfm_reward.asking import Asker, HttpAnswer, Unanswered, check_url
from wfm_reward.base import MediaBatch, MediaItem, Range, Reward, RewardError, Score

FAMILIES = ("REMOTE_REWARD", "WFM_REWARD", "DIFFUSION_REWARD")  # of variables; the later two are older names
KEEP_REPLICA = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"
POLL_S = 0.5
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
OCTETS = {"Content-Type": "application/octet-stream"}


class Remote(Reward):
    """The score that another service computes under the name `reward`, in its range.

    Where it is: the variables REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL and, if it wants one,
    REMOTE_REWARD_TOKEN; the same with WFM_REWARD_ or DIFFUSION_REWARD_ in front. `remote/NAME` is `remote` with the
    option `reward: NAME`, so that a recipe can name several.
    """

    name = "remote"
    media = frozenset({"image", "video"})
    outputs: ClassVar = {"remote": Range(-math.inf, math.inf)}
    primary = "remote"
    label_option = "reward"
    stall_s = 660.0

    def __init__(
        self, device: str = "cpu", *, reward: str, output: str | None = None, timeout_s: float = 600.0, **options: Any
    ) -> None:
        """`output`: which of the service's scores, or a sum such as vq_reward+mq_reward; unset if there is one alone.
        `timeout_s`: for a batch, at most 600. Raises RewardError for other values."""
        super().__init__(device, **options)
        if not 0 < timeout_s <= 600:
            raise RewardError(f"reward remote: timeout_s is {timeout_s}, not within 0 and 600")
        self.reward, self.output, self.timeout_s = reward, output, timeout_s

    def load(self) -> None:
        """Raises RewardError if no variables say where the service is, or two families of them differ."""
        self._enqueue_url, self._fetch_url, token = endpoint(os.environ)
        self._asker = Asker(token)
        self._keep_replica = os.environ.get(KEEP_REPLICA, "").lower() not in ("1", "true")

    def score(self, batch: MediaBatch) -> list[Score]:
        """One request for the batch. Raises RewardError if the token is refused or the output is not there."""
        deadline_s = time.monotonic() + self.timeout_s
        try:
            answer = self._answer(enqueue_body(self.reward, batch), deadline_s)
        except Unanswered as error:
            return [item.failed(f"remote {self.reward}: {error}") for item in batch]
        return list(self._scores(answer, batch))

    def _answer(self, body: bytes, deadline_s: float) -> Mapping[str, Any]:
        """Raises Unanswered."""
        accepted = _good(self._asker.post(self._enqueue_url, body, OCTETS, deadline_s))
        uuid, replica = accepted.get("uuid"), accepted.get("replica_id")
        if not isinstance(uuid, str):
            raise Unanswered(f"{self._enqueue_url} gave no uuid")
        target = {"X-Lepton-Replica-Target": str(replica)} if replica and self._keep_replica else {}
        form = urlencode({"uuid": uuid, "type": self.reward}).encode()
        while True:
            answer = self._asker.post(self._fetch_url, form, {**FORM, **target}, deadline_s)
            if answer.status != 400:  # not ready, and in Cosmos-RL's service also failed: until the deadline
                return _good(answer)
            if time.monotonic() + POLL_S >= deadline_s:
                raise Unanswered(f"no scores within {self.timeout_s:g} s: {answer.text()}")
            self._asker.pause(POLL_S)

    def _scores(self, answer: Mapping[str, Any], batch: MediaBatch) -> list[Score]:
        lists = answer.get("scores")
        if not isinstance(lists, dict) or not lists:
            raise RewardError(f"remote {self.reward}: the service gave no scores: {str(answer)[:200]}")
        numbers = {
            name: values
            for name, values in lists.items()
            if isinstance(values, list) and all(v is None or _is_number(v) for v in values)
        }
        short = [name for name, values in numbers.items() if len(values) != len(batch)]
        if short:
            raise RewardError(f"remote {self.reward}: {len(numbers[short[0]])} scores for {len(batch)} items")
        wanted = self._wanted(numbers)
        reasons = {
            f.get("index"): f.get("reason")
            for f in answer.get("failures", ())
            if isinstance(f, dict) and f.get("reason")
        }
        return [
            _score(item, {name: values[i] for name, values in numbers.items()}, wanted, reasons.get(i))
            for i, item in enumerate(batch)
        ]

    def _wanted(self, numbers: Mapping[str, Sequence[Any]]) -> list[str]:
        """The outputs that are summed. Raises RewardError if they are not there, or it is not clear which."""
        wanted = list(numbers) if self.output is None else [part.strip() for part in self.output.split("+")]
        if (self.output is None and len(wanted) != 1) or not set(wanted) <= numbers.keys():
            raise RewardError(
                f"remote {self.reward}: the service has the outputs {', '.join(numbers)}; set the option `output` to "
                "one of them, or to a sum with +"
            )
        return wanted


def endpoint(environment: Mapping[str, str]) -> tuple[str, str, str | None]:
    """(enqueue address, fetch address, token) of the first family of variables that has both addresses.

    Raises RewardError if there is none, or a second one says something else.
    """
    found = {}
    for family in FAMILIES:
        enqueue, fetch, token = (
            environment.get(f"{family}_{key}") or None for key in ("ENQUEUE_URL", "FETCH_URL", "TOKEN")
        )
        if enqueue and fetch:
            found[family] = (
                check_url(enqueue, f"{family}_ENQUEUE_URL"),
                check_url(fetch, f"{family}_FETCH_URL"),
                token,
            )
        elif enqueue or fetch:
            lacking = "FETCH_URL" if enqueue else "ENQUEUE_URL"
            raise RewardError(f"reward remote: {family}_{lacking} is not set, but its sibling is: set both or none")
    if not found:
        raise RewardError("reward remote: set REMOTE_REWARD_ENQUEUE_URL, REMOTE_REWARD_FETCH_URL, REMOTE_REWARD_TOKEN")
    if len(set(found.values())) > 1:
        raise RewardError(f"reward remote: the variables of {' and '.join(found)} differ: unset those of one of them")
    return next(iter(found.values()))


def enqueue_body(reward: str, batch: MediaBatch) -> bytes:
    """One line of JSON, a newline, and the media as numpy.save writes them: images [B,H,W,3], videos [B,3,T,H,W]."""
    video = batch.media.ndim == 5
    fields: dict[str, Any] = {
        "prompts": list(batch.prompts),
        "reward_fn": {reward: 1.0},
        "media_type": "video" if video else "image",
        "metadata": [dict(one) for one in batch.metadata],
    }
    if video:
        fields["video_infos"] = [{} if batch.fps is None else {"video_fps": batch.fps}] * len(batch)
    if all("tag" in one and "include" in one for one in batch.metadata):
        fields["geneval_tags"] = [one["tag"] for one in batch.metadata]
        fields["geneval_includes"] = [json.dumps(one["include"]) for one in batch.metadata]
    media = np.ascontiguousarray(batch.media.transpose(0, 4, 1, 2, 3)) if video else batch.media
    array = io.BytesIO()
    np.save(array, media, allow_pickle=False)
    return json.dumps(fields).encode() + b"\n" + array.getvalue()


def _good(answer: HttpAnswer) -> dict[str, Any]:
    if answer.status != 200:
        raise Unanswered(f"an answer of status {answer.status}: {answer.text()}")
    return answer.json()


def _score(item: MediaItem, values: Mapping[str, Any], wanted: Sequence[str], reason: str | None) -> Score:
    lacking = [name for name in wanted if values[name] is None or not math.isfinite(values[name])]
    if lacking:
        return item.failed(reason or f"the service has no {lacking[0]} of it")
    if item.fps is not None and all(value == -1.0 for value in values.values()):
        return item.failed("the service says -1 throughout, as it does where a video could not be scored")
    parts = {name: float(v) for name, v in values.items() if v is not None and math.isfinite(v)}
    return item.scored(sum(float(values[name]) for name in wanted), **parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
