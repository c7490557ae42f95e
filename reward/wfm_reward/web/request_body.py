"""Token check, and reading of request bodies with a deadline and a memory limit."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import BasicAuth, ClientPayloadError, web
from multidict import MultiDictProxy

from wfm_reward.web.requests import HttpProblem, unreadable_input

CHUNK_BYTES = 256 * 1024


class MemoryBudget:
    """Thread-safe memory limit of all requests, for received bodies and for images and videos without scores."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.lock = threading.Lock()

    def check_fits(self, num_bytes: int, held: int = 0) -> None:
        """Raise HttpProblem 413 if `num_bytes` can never fit, and 429 if they do not fit now.

        held: bytes that the request has already reserved.
        """
        if num_bytes > self.max_bytes:
            detail = f"this request needs {num_bytes} bytes; the limit is {self.max_bytes}: send fewer items"
            raise HttpProblem(413, "too_large", detail)
        if self.reserved_bytes - held + num_bytes > self.max_bytes:
            detail = f"more than {self.max_bytes} bytes are waiting to be scored"
            raise HttpProblem(429, "full", detail, retry_after_s=5)


class Reservation:
    """Bytes that one request has reserved. Call `release` when done. Thread-safe."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def resize(self, num_bytes: int) -> None:
        with self._budget.lock:
            if num_bytes > self._num_bytes:
                self._budget.check_fits(num_bytes, self._num_bytes)
            self._budget.reserved_bytes += num_bytes - self._num_bytes
            self._num_bytes = num_bytes

    def grow(self, num_bytes: int) -> None:
        """Reserve more bytes. Call this before they are allocated. Raises HttpProblem like MemoryBudget.check_fits."""
        self.resize(self._num_bytes + num_bytes)

    def transfer(self, num_bytes: int) -> Reservation:
        """Return a new reservation of `num_bytes` that replaces this one. Raises HttpProblem if they do not fit."""
        self.resize(num_bytes)
        successor = Reservation(self._budget)
        successor._num_bytes, self._num_bytes = num_bytes, 0
        return successor

    def release(self) -> None:
        self.resize(0)


def check_token(header: str | None, token: str | None) -> None:
    """Raise HttpProblem 401 unless the Authorization header has the token. Compares in constant time."""
    if token is None:
        return
    scheme, _, credentials = (header or "").partition(" ")
    if scheme.lower() == "basic":
        try:
            credentials = BasicAuth.decode(header or "", "utf-8").password
        except ValueError:
            credentials = ""
    elif scheme.lower() != "bearer":
        credentials = ""
    # aiohttp passes bytes that are not UTF-8 as surrogates.
    if not hmac.compare_digest(credentials.strip().encode(errors="surrogateescape"), token.encode()):
        detail = "the token is wrong" if header else "a token is needed: send the header Authorization: Bearer TOKEN"
        raise HttpProblem(401, "unauthorized", detail)


def check_encoding(request: web.Request) -> None:
    encodings = ",".join(request.headers.getall("Content-Encoding", []))
    if encodings.strip().lower() not in ("", "identity"):
        detail = f"Content-Encoding {encodings[:40]!r} is not supported: send the body uncompressed"
        raise HttpProblem(415, "encoded", detail)


@contextlib.asynccontextmanager
async def receive_body(
    request: web.Request, budget: MemoryBudget, max_bytes: int, timeout_s: float
) -> AsyncIterator[tuple[memoryview, Reservation]]:
    """Yield the body of a request and its memory reservation. Releases the reservation on exit.

    Raises HttpProblem 408 if the body does not arrive within `timeout_s`, and 411, 413 or 429 in other cases.
    """
    size = request.content_length
    if size is None:
        raise HttpProblem(411, "length_required", "send Content-Length")
    if size > max_bytes:
        raise HttpProblem(413, "too_large", f"a body of {size} bytes; at most {max_bytes} are allowed")
    budget.check_fits(size)
    reservation = Reservation(budget)
    try:
        yield memoryview(await _read_body(request, reservation, timeout_s)), reservation
    finally:
        reservation.release()


async def _read_body(request: web.Request, reservation: Reservation, timeout_s: float) -> bytearray:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_chunked(CHUNK_BYTES):
                reservation.grow(len(chunk))
                body += chunk
    except TimeoutError as error:
        detail = f"received {len(body)} of {request.content_length} bytes within {timeout_s:g} s (http.body_timeout_s)"
        raise HttpProblem(408, "too_slow", detail) from error
    return body


async def read_form(request: web.Request, timeout_s: float) -> MultiDictProxy[Any]:
    """Read the fields of a form. Raises HttpProblem 408 or 422, and web.HTTPException if the form is too large."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.post()
    except TimeoutError as error:
        raise HttpProblem(408, "too_slow", f"the form did not arrive within {timeout_s:g} s") from error
    except (web.HTTPException, ClientPayloadError, ConnectionError):
        raise
    except Exception as error:
        raise unreadable_input("the form", error) from error
