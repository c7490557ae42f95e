"""HTTP client for rewards that call other services."""

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

MAX_RESPONSE_BYTES = 8 * 2**20
FIRST_WAIT_S = 0.5
PROBE_TIMEOUT_S = 10.0
MAX_WAIT_S = 8.0
BUSY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})  # to retry


class HttpRequestError(Exception):
    """Raised if there is no usable response before the deadline. The message has the last response or error."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes

    def parse_json(self) -> dict[str, Any]:
        try:
            content = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpRequestError(
                f"a response with status {self.status} is not JSON: {self.body_excerpt()}"
            ) from error
        if not isinstance(content, dict):
            raise HttpRequestError(f"a response with status {self.status} is not a JSON object: {self.body_excerpt()}")
        return content

    def body_excerpt(self) -> str:
        return " ".join(self.body[:300].decode(errors="replace").split())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Prevents redirects, because a redirect would send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(slots=True)
class HttpClient:
    """HTTP client that retries requests until a deadline."""

    token: str | None = None  # sent as `Authorization: Bearer`
    _opener: urllib.request.OpenerDirector = field(default_factory=lambda: urllib.request.build_opener(_NoRedirects))

    def post(self, url: str, body: bytes, headers: Mapping[str, str], deadline_s: float) -> HttpResponse:
        """Send a POST request, and retry after connection errors and responses with BUSY_STATUSES.

        deadline_s: a `time.monotonic()` value. Raises HttpRequestError if there is no usable response before the
        deadline, and RewardError if the server rejects the token.
        """
        wait_s = FIRST_WAIT_S
        while True:
            try:
                response = self._post_once(url, body, headers, max(0.1, deadline_s - time.monotonic()))
                if response.status in (401, 403):
                    raise RewardError(f"{url} rejects the token ({response.status}): {response.body_excerpt()}")
                if response.status not in BUSY_STATUSES:
                    return response
                problem = f"{url} responds with {response.status}: {response.body_excerpt()}"
            except (OSError, http.client.HTTPException) as error:  # urllib's and the timeouts are OSErrors
                problem = f"{url}: {getattr(error, 'reason', error) or type(error).__name__}"
            if time.monotonic() + wait_s >= deadline_s:
                raise HttpRequestError(problem)
            pause(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _post_once(self, url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> HttpResponse:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(url, body, {**headers, **bearer}, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                content = response.read(MAX_RESPONSE_BYTES + 1)
                if len(content) > MAX_RESPONSE_BYTES:
                    raise http.client.HTTPException(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
                return HttpResponse(response.status, content)
        except urllib.error.HTTPError as error:
            with error:
                return HttpResponse(error.code, error.read(MAX_RESPONSE_BYTES))


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def check_reply(url: str, label: str) -> None:
    """Raise RewardError if no server accepts connections at `url`. label: start of the error message."""
    try:
        urllib.request.build_opener(_NoRedirects).open(
            urllib.request.Request(url, method="HEAD"), None, PROBE_TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:
        raise RewardError(f"{label}: cannot connect to {url}: {error.reason}; start its service") from error
    except (OSError, http.client.HTTPException):
        pass  # connected, but the server does not know HEAD


def check_url(url: str, label: str) -> str:
    """Return `url`. Raises RewardError unless it starts with http:// or https://.

    label: name of the setting in the error message.
    """
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise RewardError(f"{label} is {url!r}; it must start with http:// or https://")
    return url
