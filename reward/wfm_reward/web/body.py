"""Bodies of requests: read within a deadline, their bytes reserved as they arrive, never unpacked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientPayloadError, web
from multidict import MultiDictProxy

from wfm_reward.web.budget import MemoryBudget, Reservation
from wfm_reward.web.problem import HttpProblem, malformed

CHUNK_BYTES = 256 * 1024


def check_encoding(request: web.Request) -> None:
    """Raise HttpProblem 415 for a compressed body: what it unpacks to is not known before."""
    encodings = ",".join(request.headers.getall("Content-Encoding", []))
    if encodings.strip().lower() not in ("", "identity"):
        detail = f"Content-Encoding {encodings[:40]!r} is not read: send the body as it is"
        raise HttpProblem(415, "encoded", detail)


@contextlib.asynccontextmanager
async def received(
    request: web.Request, budget: MemoryBudget, max_bytes: int, timeout_s: float
) -> AsyncIterator[tuple[memoryview, Reservation]]:
    """Yield the body and its reservation, which is released in the end.

    What a client claims to send reserves nothing, so that it cannot keep others out by claims. Raises HttpProblem: 408
    if the body is not there within `timeout_s`, 411, 413, 429.
    """
    size = request.content_length
    if size is None:
        raise HttpProblem(411, "length_required", "send Content-Length")
    if size > max_bytes:
        raise HttpProblem(413, "too_large", f"a body of {size} bytes; {max_bytes} are allowed")
    budget.check(size)
    reservation = budget.reserve(0)
    try:
        yield memoryview(await _read(request, reservation, timeout_s)), reservation
    finally:
        reservation.release()


async def _read(request: web.Request, reservation: Reservation, timeout_s: float) -> bytearray:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_chunked(CHUNK_BYTES):
                reservation.grow(len(chunk))
                body += chunk
    except TimeoutError as error:
        detail = f"{len(body)} of {request.content_length} bytes came within {timeout_s:g} s (http.body_timeout_s)"
        raise HttpProblem(408, "too_slow", detail) from error
    return body


async def form(request: web.Request, timeout_s: float) -> MultiDictProxy[Any]:
    """The fields of a form. Raises HttpProblem 408 or 422, and web.HTTPException if it is too large."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.post()
    except TimeoutError as error:
        raise HttpProblem(408, "too_slow", f"the form did not come within {timeout_s:g} s") from error
    except (web.HTTPException, ClientPayloadError, ConnectionError):
        raise
    except Exception as error:
        raise malformed(f"the form cannot be read: {' '.join(str(error).split())[:100]}") from error
