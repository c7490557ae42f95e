"""Requests to other services over HTTP, for rewards that are computed elsewhere. Standard library alone."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wfm_ds.errors import RewardError

ANSWER_BYTES = 8 * 2**20
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 8.0
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})  # worth asking again


class Unanswered(Exception):
    """No usable answer in time; the message says what was asked and what came."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Raises Unanswered if it is not a JSON object."""
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"an answer of status {self.status} is not JSON: {self.text()}") from error
        if not isinstance(content, dict):
            raise Unanswered(f"an answer of status {self.status} is not a JSON object: {self.text()}")
        return content

    def text(self) -> str:
        """The beginning of the body on one line, for people."""
        return " ".join(self.body[:300].decode(errors="replace").split())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(slots=True)
class Asker:
    """`post` until there is an answer or the deadline has passed."""

    token: str | None = None  # sent as `Authorization: Bearer`
    _opener: urllib.request.OpenerDirector = field(default_factory=lambda: urllib.request.build_opener(_NoRedirects))
    _never: threading.Event = field(default_factory=threading.Event)

    def post(self, url: str, body: bytes, headers: Mapping[str, str], deadline_s: float) -> HttpAnswer:
        """The first answer that is not "busy"; after those and after failures to connect it waits and asks again.

        `deadline_s` is on time.monotonic. Raises Unanswered once it has passed, RewardError if the token is refused.
        """
        wait_s = FIRST_WAIT_S
        while True:
            trouble = f"nothing came within the time from {url}"
            try:
                answer = self._once(url, body, headers, max(0.1, deadline_s - time.monotonic()))
                if answer.status in (401, 403):
                    raise RewardError(f"{url} refuses the token ({answer.status}): {answer.text()}")
                if answer.status not in BUSY:
                    return answer
                trouble = f"{url} answers {answer.status}: {answer.text()}"
            except (OSError, http.client.HTTPException) as error:  # urllib's and the timeouts are OSErrors
                trouble = f"{url}: {getattr(error, 'reason', error) or type(error).__name__}"
            if time.monotonic() + wait_s >= deadline_s:
                raise Unanswered(trouble)
            self.pause(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def pause(self, seconds: float) -> None:
        self._never.wait(seconds)

    def _once(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> HttpAnswer:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(url, body, {**headers, **bearer}, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return HttpAnswer(response.status, _bounded(response.read(ANSWER_BYTES + 1)))
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, error.read(ANSWER_BYTES))


def _bounded(body: bytes) -> bytes:
    if len(body) > ANSWER_BYTES:
        raise http.client.HTTPException(f"an answer of more than {ANSWER_BYTES} bytes")
    return body


def check_url(url: str, what: str) -> str:
    """The address, if it is one for HTTP. Raises RewardError."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise RewardError(f"{what} is {url!r}, not an address that begins with http:// or https://")
    return url
