"""Schemas of all messages, with the purpose of each key. wire.py rejects any other message.

A *task* is one unit of work for one worker: a range of the *rows* of a submission. A row is a small map, plus the
tensor with the same index in the tensor table of the submission. Images and videos are therefore sent only once for all
rewards, and the broker forwards the rows of a task without decoding them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_ROWS = 64  # per submission
MAX_TASKS = 1024  # per submission
MAX_ITEMS = 4096  # in any other list
ID_CHARS = 300
REASON_CHARS = 300
DETAIL_CHARS = 8000  # a traceback
META_BYTES = 32 * 1024  # limit of a result's meta: half a header, so that the broker can forward it


@dataclass(frozen=True, slots=True)
class Text:
    max_chars: int = ID_CHARS


@dataclass(frozen=True, slots=True)
class Integer:
    low: int = 0
    high: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number; wire.py rejects NaN and infinities."""

    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Flag:
    pass


@dataclass(frozen=True, slots=True)
class FreeMap:
    """Any map of plain values. wire.py limits its nesting depth, and the size limit of headers also limits its size."""


@dataclass(frozen=True, slots=True)
class ListOf:
    item: FieldType
    max_items: int = MAX_ITEMS


@dataclass(frozen=True, slots=True)
class FixedList:
    items: tuple[FieldType, ...]


@dataclass(frozen=True)
class FieldMap:
    items: Mapping[str, FieldType]


FieldType: TypeAlias = Text | Integer | Number | Flag | FreeMap | ListOf | FixedList | FieldMap

_ID = Text()
_IDS = ListOf(_ID)
_REASON = Text(REASON_CHARS)

_TASK = FieldMap({
    "id": _ID,  # equal ids mean equal work, so submissions can be repeated
    "kind": _ID,  # selects the workers, e.g. score:ocr
    "start": Integer(0, MAX_ROWS),  # rows [start, stop) of the submission
    "stop": Integer(1, MAX_ROWS),
    "deadline_s": Number(),  # remaining seconds, independent of the peers' clocks
})  # fmt: skip
_COMPLETION = FieldMap({
    "seq": Integer(1),  # counts the submitter's completions; `since` requests those after a seq
    "id": _ID,
    "ok": Flag(),
    "worker": Text(),
    "attempt": Integer(),
    "seconds": Number(),
    "meta": FreeMap(),
    "reason": Text(),  # of a failure; empty if ok
})  # fmt: skip

SCHEMAS: dict[str, dict[str, FieldType]] = {
    # worker -> broker
    "hello": {
        "worker": Text(64),  # the logical id; unlike the route, it survives reconnections
        "life": Text(64),  # one per process: a new value means that the previous process died
        "name": Text(),  # for display
        "kinds": ListOf(_ID, 64),
        "credit": Integer(1, 1024),  # rows it can hold at once
        "held": _IDS,  # ids of the tasks it has; other tasks leased to it were lost in transit
    },
    "beat": {"progress": ListOf(FixedList((_ID, Integer(1), Integer(), Integer())))},  # [id, attempt, done, total]
    "result": {"id": _ID, "attempt": Integer(1), "seconds": Number(), "meta": FreeMap()},
    "failed": {
        "id": _ID,
        "attempt": Integer(1),
        "reason": _REASON,
        "detail": Text(DETAIL_CHARS),
        "fatal": Flag(),  # True: do not try again
    },
    "leave": {"why": _REASON},  # the worker returns its tasks unfinished
    # broker -> worker
    "welcome": {"hub": Text(64), "beat_s": Number()},  # `hub` changes at each start of the broker
    "task": {
        "id": _ID,
        "attempt": Integer(1),  # lease number; not every lease counts as a failed attempt
        "kind": _ID,
        "rows": ListOf(FreeMap(), MAX_ROWS),
        "note": FreeMap(),  # the last announcement of the broker's owner, e.g. the weights to use
    },
    "ack": {"ids": _IDS},
    "stalled": {"id": _ID, "attempt": Integer(1)},  # no progress on this lease; the task may not have arrived
    "bye": {"why": _REASON},  # all work is done: leave
    # client -> broker
    "attach": {"run": Text(120), "client": Text(120), "epoch": Integer()},  # a restarted client has a higher epoch
    "submit": {"rows": ListOf(FreeMap(), MAX_ROWS), "tasks": ListOf(_TASK, MAX_TASKS)},
    "since": {"seq": Integer()},  # completions up to seq have arrived; also the keep-alive
    "fetch": {"id": _ID},  # the tensors of a result, for any client of the submitter's run
    "read": {"file": _ID, "offset": Integer()},  # a piece of an announced file
    "release": {"ids": _IDS},  # these results are no longer needed; repeated until `released`
    # broker -> client
    "attached": {
        "session": Text(64),  # a new value means that the broker has none of this client's tasks
        "kinds": FreeMap(),  # task kinds offered -> information from the configuration
    },
    "accepted": {"ids": _IDS, "known": _IDS, "refused": ListOf(FixedList((_ID, Text())))},
    "finished": {
        "after": Integer(),  # the seq before these items; lets clients detect lost messages
        "items": ListOf(_COMPLETION),
    },
    "released": {"ids": _IDS},
    "payload": {"id": _ID},  # a result, or `file@offset`
    "missing": {"id": _ID, "why": _REASON},
    # broker -> any, client -> broker
    "who": {},  # unknown route: send `hello` or `attach` again
    "reject": {"about": Integer(), "why": _REASON},
    "cancel": {"ids": _IDS, "why": _REASON},
}

WORKER_TO_BROKER = frozenset({"hello", "beat", "result", "failed", "leave"})
BROKER_TO_WORKER = frozenset({"welcome", "task", "ack", "stalled", "cancel", "bye", "who", "reject"})
CLIENT_TO_BROKER = frozenset({"attach", "submit", "since", "fetch", "read", "release", "cancel"})
BROKER_TO_CLIENT = frozenset({"attached", "accepted", "finished", "payload", "missing", "released", "who", "reject"})
TYPES_WITH_TENSORS = frozenset({"submit", "task", "result", "payload"})


def find_problem(value: Any, field_type: FieldType) -> str:
    """Return what is wrong with a value, "" if it is valid."""
    match field_type:
        case Text(max_chars):
            good = type(value) is str and len(value) <= max_chars
            return "" if good else f"is not a string of at most {max_chars} characters"
        case Integer(low, high):
            good = type(value) is int and low <= value <= high
            return "" if good else f"is not an integer from {low} to {high}"
        case Number(low, high):
            good = type(value) in (int, float) and low <= value <= high
            return "" if good else f"is not a number from {low} to {high}"
        case Flag():
            return "" if type(value) is bool else "is not true or false"
        case FreeMap():
            return "" if type(value) is dict else "is not a map"
        case ListOf(item, max_items):
            if type(value) not in (list, tuple) or len(value) > max_items:
                return f"is not a list of at most {max_items}"
            return next((f"[{i}] {p}" for i, v in enumerate(value) if (p := find_problem(v, item))), "")
        case FixedList(items):
            if type(value) not in (list, tuple) or len(value) != len(items):
                return f"is not a list of {len(items)}"
            return next((f"[{i}] {p}" for i, v in enumerate(value) if (p := find_problem(v, items[i]))), "")
        case FieldMap(items):
            if type(value) is not dict or value.keys() != items.keys():
                return f"is not a map of {', '.join(items)}"
            return next((f".{k} {p}" for k, c in items.items() if (p := find_problem(value[k], c))), "")
