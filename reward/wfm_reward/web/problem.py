"""Errors of a request, in the words and codes of the HTTP answer."""

from __future__ import annotations

import json
from typing import Any


class HttpProblem(Exception):
    """The request gets this answer: {"message": detail, "error": {"code", "detail"}}."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s
        self.content: dict[str, Any] = {"message": detail, "error": {"code": code, "detail": detail}}


def malformed(detail: str) -> HttpProblem:
    return HttpProblem(422, "malformed", detail)


def check_encodable(*values: Any) -> None:
    """Raise HttpProblem for a text that UTF-8 cannot encode: no message, page or log line could carry it."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        detail = f"a text has half a surrogate pair ({error.object[error.start]!a}), which UTF-8 cannot encode"
        raise malformed(detail) from error
