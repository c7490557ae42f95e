"""What is wrong with a request, in the words and codes of the HTTP answer."""

from __future__ import annotations

from typing import Any


class Problem(Exception):
    """The request gets this answer: {"message": detail, "error": {"code", "detail"}}."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s
        self.content: dict[str, Any] = {"message": detail, "error": {"code": code, "detail": detail}}


def malformed(detail: str) -> Problem:
    return Problem(422, "malformed", detail)
