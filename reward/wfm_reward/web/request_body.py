"""Reading of request bodies with a deadline and a memory reservation. Compressed bodies are rejected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientPayloadError, web
from multidict import MultiDictProxy

from wfm_reward.web.http_problem import HttpProblem, invalid_request
from wfm_reward.web.memory_budget import MemoryBudget, Reservation

CHUNK_BYTES = 256 * 1024


def check_encoding(request: web.Request) -> None:
    """Raise HttpProblem 415 for a compressed body, because its decompressed size is unknown."""
    encodings = ",".join(request.headers.getall("Content-Encoding", []))
    if encodings.strip().lower() not in ("", "identity"):
        detail = f"Content-Encoding {encodings[:40]!r} is not supported: send the body uncompressed"
        raise HttpProblem(415, "encoded", detail)


@contextlib.asynccontextmanager
async def receive_body(
    request: web.Request, budget: MemoryBudget, max_bytes: int, timeout_s: float
) -> AsyncIterator[tuple[memoryview, Reservation]]:
    """Yield the body and its memory reservation, which is released on exit.

    Memory is reserved as bytes arrive, not from Content-Length, so a client cannot block others by announcing a large
    body. Raises HttpProblem: 408 if the body does not arrive within `timeout_s`, and 411, 413, 429.
    """
    size = request.content_length
    if size is None:
        raise HttpProblem(411, "length_required", "send Content-Length")
    if size > max_bytes:
        raise HttpProblem(413, "too_large", f"a body of {size} bytes; at most {max_bytes} are allowed")
    budget.check_fits(size)
    reservation = budget.reserve(0)
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
    """Read the fields of a form. Raises HttpProblem 408 or 422, and web.HTTPException if it is too large."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.post()
    except TimeoutError as error:
        raise HttpProblem(408, "too_slow", f"the form did not arrive within {timeout_s:g} s") from error
    except (web.HTTPException, ClientPayloadError, ConnectionError):
        raise
    except Exception as error:
        raise invalid_request(f"the form cannot be read: {' '.join(str(error).split())[:100]}") from error
