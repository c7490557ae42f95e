"""Parse the scoring requests of HTTP clients and define the errors returned to them, for both protocols."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy.typing as npt
from pydantic import BaseModel, ValidationError

MAX_ITEMS = 4096
MAX_PLACE_CHARS = 100
Fields = TypeVar("Fields", bound=BaseModel)


class HttpProblem(Exception):
    """An error reply: {"message": detail, "error": {"code", "detail"}}."""

    def __init__(self, status: int, code: str, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after_s = retry_after_s
        self.content: dict[str, Any] = {"message": detail, "error": {"code": code, "detail": detail}}


def invalid_request(detail: str) -> HttpProblem:
    return HttpProblem(422, "malformed", detail)


def parse_json(text: str | bytes, label: str) -> Any:
    """Parse JSON. Raises HttpProblem with the text "LABEL is not JSON"."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_request(f"{label} is not JSON: {str(error)[:100]}") from error


def unreadable_input(label: str, error: Exception) -> HttpProblem:
    return invalid_request(f"{label} cannot be read: {' '.join(str(error).split())[:100] or type(error).__name__}")


def parse_fields(model: type[Fields], content: Any) -> Fields:
    """Validate the decoded JSON of a request. Raises HttpProblem about the first invalid field."""
    try:
        fields = model.model_validate(content)
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        detail = f"a string has a lone surrogate ({error.object[error.start]!a}), which UTF-8 cannot encode"
        raise invalid_request(detail) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:MAX_PLACE_CHARS]
        raise invalid_request(f"`{place}`: {first['msg']}" if place else first["msg"]) from error
    return fields


def check_length(name: str, values: Sized, count: int) -> None:
    """Raise HttpProblem unless a field has one value per item."""
    if len(values) != count:
        raise invalid_request(f"`{name}` has {len(values)} values for {count} items")


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Validated items and the rewards to compute for them."""

    rewards: tuple[str, ...]
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any]]
    fps: Sequence[float | None]
    media: Sequence[npt.NDArray[Any]]
    """One array per item: image uint8 [H,W,3], video uint8 [T,H,W,3], or latents float16 or float32 [C,T,h,w]."""
    latents: bool
    info: Mapping[str, Any]
    """Information about the received array, for the reply."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.media)
