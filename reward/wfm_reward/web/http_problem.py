"""Errors of HTTP requests, with the status, code and message of the reply."""

from __future__ import annotations

import json
from typing import Any


class HttpProblem(Exception):
    """An error reply: {"message": detail, "error": {"code", "detail"}}."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s
        self.content: dict[str, Any] = {"message": detail, "error": {"code": code, "detail": detail}}


def invalid_request(detail: str) -> HttpProblem:
    return HttpProblem(422, "malformed", detail)


def check_encodable(*values: Any) -> None:
    """Raise HttpProblem for strings that UTF-8 cannot encode.

    Messages, pages and logs cannot contain such strings.
    """
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        detail = f"a string has a lone surrogate ({error.object[error.start]!a}), which UTF-8 cannot encode"
        raise invalid_request(detail) from error
