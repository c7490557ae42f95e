"""Rewards that a vision-language model gives, behind any endpoint that speaks OpenAI's chat completions (vLLM does)."""

from __future__ import annotations

import base64
import io
import json
import os
import time
from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from wfm_reward.asking import Asker, Unanswered, check_url
from wfm_reward.base import MediaBatch, MediaItem, Reward, RewardError, Score

JSON = {"Content-Type": "application/json"}
VIDEO_CRF = "12"  # of H.264: hardly any loss


class Judge(Reward):
    """Asks once for each item, several at a time. An answer without a score is a failure."""

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
        """`endpoint`: the address before /chat/completions, such as http://127.0.0.1:8000/v1. `api_key_env`: the
        environment variable that holds the key. Raises RewardError for what cannot be used."""
        super().__init__(device, **options)
        if not 0 < timeout_s <= 600 or not isinstance(concurrency, int) or concurrency < 1:
            raise RewardError(
                f"reward {self.name}: timeout_s must be within 0 and 600, concurrency a whole number of at least 1"
            )
        self.url = check_url(endpoint, f"reward {self.name}: endpoint").rstrip("/") + "/chat/completions"
        self.model, self.api_key_env, self.timeout_s, self.concurrency = model, api_key_env, timeout_s, concurrency

    def load(self) -> None:
        """Raises RewardError if the key is not there."""
        key = None if self.api_key_env is None else os.environ.get(self.api_key_env)
        if self.api_key_env is not None and not key:
            raise RewardError(f"reward {self.name}: the environment variable {self.api_key_env} is not set")
        self._asker = Asker(key)
        self._pool = ThreadPoolExecutor(self.concurrency)

    def score(self, batch: MediaBatch) -> list[Score]:
        return list(self._pool.map(self._ask, batch))

    @abstractmethod
    def question(self, item: MediaItem) -> Mapping[str, Any]:
        """The keys of the request beside `model`: messages and how to answer."""

    @abstractmethod
    def judged(self, item: MediaItem, choice: Mapping[str, Any]) -> Score:
        """The score in the first choice of an answer. Raises KeyError, TypeError or ValueError if it has none."""

    def _ask(self, item: MediaItem) -> Score:
        body = json.dumps({"model": self.model, "temperature": 0, **self.question(item)}).encode()
        try:
            answer = self._asker.post(self.url, body, JSON, time.monotonic() + self.timeout_s)
            if answer.status != 200:
                return item.failed(f"{self.url} answers {answer.status}: {answer.text()}")
            choice = answer.json()["choices"][0]
            return self.judged(item, choice)
        except Unanswered as error:
            return item.failed(str(error))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return item.failed(f"the judge's answer has no score: {type(error).__name__}: {str(error)[:120]}")


def picture_url(image: npt.NDArray[np.uint8]) -> str:
    """A PNG [H,W,3] as a data: address."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def video_url(frames: npt.NDArray[np.uint8], fps: float) -> str:
    """An MP4 of uint8 [T,H,W,3] as a data: address."""
    return f"data:video/mp4;base64,{base64.b64encode(mp4(frames, fps)).decode()}"


def mp4(frames: npt.NDArray[np.uint8], fps: float) -> bytes:
    """H.264 of uint8 [T,H,W,3], with hardly any loss. An odd last row or column is left out: 4:2:0 cannot hold it."""
    from fractions import Fraction

    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": VIDEO_CRF})
        stream.height, stream.width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2
        stream.pix_fmt = "yuv420p"
        for frame in frames[:, : stream.height, : stream.width]:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return buffer.getvalue()
