"""Rewards from a vision-language model (VLM) behind an OpenAI-compatible chat completions endpoint, such as vLLM."""

from __future__ import annotations

import base64
import io
import json
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.base import MediaBatch, MediaItem, Reward, RewardError, Score
from wfm_reward.http_client import HttpClient, HttpRequestError, check_reply, check_url

JSON_HEADERS = {"Content-Type": "application/json"}
VIDEO_CRF = "12"  # H.264 quality, nearly lossless


class VlmReward(Reward):
    """Base class of rewards that ask a VLM for the score of each item. Requests are concurrent."""

    stall_s = 660.0

    def __init__(
        self,
        device: str = "cpu",
        *,
        endpoint: str,
        model: str,
        api_key_env: str | None = None,
        timeout_s: float = 120.0,
        concurrency: int = 8,
        **options: Any,
    ) -> None:
        """endpoint: URL without /chat/completions, such as http://127.0.0.1:8000/v1. model: name of the model at the
        endpoint. api_key_env: name of the environment variable with the API key. concurrency: maximum number of
        concurrent requests.

        Raises RewardError if an option is invalid.
        """
        super().__init__(device, **options)
        if not 0 < timeout_s <= 600 or not isinstance(concurrency, int) or concurrency < 1:
            raise RewardError(f"reward {self.name}: timeout_s must be in (0, 600] and concurrency an integer >= 1")
        self.url = check_url(endpoint, f"reward {self.name}: endpoint").rstrip("/") + "/chat/completions"
        self.model, self.api_key_env, self.timeout_s, self.concurrency = model, api_key_env, timeout_s, concurrency

    def load(self) -> None:
        key = None if self.api_key_env is None else os.environ.get(self.api_key_env)
        if self.api_key_env is not None and not key:
            raise RewardError(f"reward {self.name}: the environment variable {self.api_key_env} is not set")
        self._client = HttpClient(key)
        self._pool = ThreadPoolExecutor(self.concurrency)

    def check_reachable(self) -> None:
        check_reply(self.url, f"reward {self.name}")

    def score(self, batch: MediaBatch) -> list[Score]:
        return list(self._pool.map(self._score_item, batch))

    @abstractmethod
    def rate_item(self, item: MediaItem) -> Score:
        """Return the score of an item, from the replies to one or more requests.

        Raises KeyError, IndexError, TypeError or ValueError if there is no score. The item then fails.
        """

    def request_text(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Return the text of a reply. Raises the same errors as `request_choice`, and TypeError without a text."""
        text = self.request_choice({"messages": messages, **fields})["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content is {type(text).__name__}")
        return text

    def request_choice(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a chat completions request and return the first choice of the reply.

        fields: all fields except `model`: messages and sampling parameters. Raises HttpRequestError if there is no
        usable reply in time.
        """
        body = json.dumps({"model": self.model, "temperature": 0, **fields}).encode()
        deadline_s = min(time.monotonic() + self.timeout_s, self.deadline_s)
        response = self._client.post(self.url, body, JSON_HEADERS, deadline_s)
        if response.status != 200:
            raise HttpRequestError(f"{self.url} responds with {response.status}: {response.body_excerpt()}")
        choice: Mapping[str, Any] = response.parse_json()["choices"][0]
        return choice

    def _score_item(self, item: MediaItem) -> Score:
        try:
            return self.rate_item(item)
        except HttpRequestError as error:
            return item.fail(str(error))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return item.fail(f"the reply has no score: {type(error).__name__}: {str(error)[:120]}")


def image_content(image: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Return the part of a message that shows an image [H,W,3], as PNG."""
    return {"type": "image_url", "image_url": {"url": png_data_url(image)}}


def png_data_url(image: npt.NDArray[np.uint8]) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def mp4_data_url(frames: npt.NDArray[np.uint8], fps: float) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(encode_mp4(frames, fps)).decode()}"


def encode_mp4(frames: npt.NDArray[np.uint8], fps: float) -> bytes:
    """Encode a video uint8 [T,H,W,3] as nearly lossless H.264. An odd last row or column is dropped."""
    from fractions import Fraction

    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": VIDEO_CRF})
        stream.height, stream.width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
        stream.pix_fmt = "yuv420p"
        for frame in frames[:, : stream.height, : stream.width]:
            video_frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(video_frame))
        container.mux(stream.encode())
    return buffer.getvalue()
