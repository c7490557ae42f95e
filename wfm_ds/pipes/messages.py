"""Every message type on the wire and its keys, with the reason beside each. wire.py refuses anything else.

A *task* is one unit of work for one worker: a range of the *rows* of a submission. A row is a small map, and the
tensor of the same index in the submission's table. So media travel once for all rewards, and the hub hands each worker
the rows of its task without opening them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_ROWS = 64  # of one submission
MAX_TASKS = 1024  # of one submission
MAX_ITEMS = 4096  # of any other list
ID_CHARS = 300
REASON_CHARS = 300
DETAIL_CHARS = 8000  # a traceback
META_BYTES = 32 * 1024  # of a result's meta: half a header, so that the hub can always pass it on


@dataclass(frozen=True, slots=True)
class Text:
    max_chars: int = ID_CHARS


@dataclass(frozen=True, slots=True)
class Integer:
    low: int = 0
    high: int = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Number:
    """Finite: wire.py lets no other through."""

    low: float = 0.0
    high: float = math.inf


@dataclass(frozen=True, slots=True)
class Flag:
    pass


@dataclass(frozen=True, slots=True)
class FreeMap:
    """Any map of plain values; wire.py bounds its depth, and the header its size."""


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Check
    max_items: int = MAX_ITEMS


@dataclass(frozen=True, slots=True)
class Tuple:
    items: tuple[Check, ...]


@dataclass(frozen=True)
class Record:
    items: Mapping[str, Check]


Check: TypeAlias = Text | Integer | Number | Flag | FreeMap | ListOf | Tuple | Record

_ID = Text()
_IDS = ListOf(_ID)
_REASON = Text(REASON_CHARS)

_TASK = Record({
    "id": _ID,  # equal id = equal work: a repeated submission changes nothing
    "kind": _ID,  # which workers can do it, such as score:ocr
    "start": Integer(0, MAX_ROWS),  # rows [start, stop) of the submission
    "stop": Integer(1, MAX_ROWS),
    "deadline_s": Number(),  # remaining: the two clocks need not agree
})  # fmt: skip
_COMPLETION = Record({
    "seq": Integer(1),  # counts the submitter's completions; it asks for those after the last one it has seen
    "id": _ID,
    "ok": Flag(),
    "worker": Text(),
    "attempt": Integer(),
    "seconds": Number(),
    "meta": FreeMap(),
    "reason": Text(),  # why there is no result; empty if ok
})  # fmt: skip

SCHEMAS: dict[str, dict[str, Check]] = {
    # worker -> hub
    "hello": {
        "worker": Text(64),  # the logical id: routes change with every reconnection, this does not
        "life": Text(64),  # of the worker's process: a new one means that the last one died
        "name": Text(),  # for people
        "kinds": ListOf(_ID, 64),
        "credit": Integer(1, 1024),  # tasks it wants to hold
        "held": _IDS,  # what it has; leases on anything else were lost on the way
    },
    "beat": {"progress": ListOf(Tuple((_ID, Integer(1), Integer(), Integer())))},  # [id, attempt, done, total]
    "result": {"id": _ID, "attempt": Integer(1), "seconds": Number(), "meta": FreeMap()},
    "failed": {
        "id": _ID,
        "attempt": Integer(1),
        "reason": _REASON,
        "detail": Text(DETAIL_CHARS),
        "fatal": Flag(),  # do not try elsewhere
    },
    "leave": {"why": _REASON},  # nothing it holds will be done
    # hub -> worker
    "welcome": {"hub": Text(64), "beat_s": Number()},  # `hub` is new at each start of the hub
    "task": {
        "id": _ID,
        "attempt": Integer(1),  # how often it was leased; not all of these count as attempts at it
        "kind": _ID,
        "rows": ListOf(FreeMap(), MAX_ROWS),
        "note": FreeMap(),  # what the hub's owner announced last, such as the weights to use
    },
    "ack": {"ids": _IDS},
    "stalled": {"id": _ID, "attempt": Integer(1)},  # this lease saw no progress; perhaps its task never arrived
    "bye": {"why": _REASON},  # the hub's work is done: leave
    # client -> hub
    "attach": {"run": Text(120), "client": Text(120), "epoch": Integer()},  # a restarted client has a higher epoch
    "submit": {"rows": ListOf(FreeMap(), MAX_ROWS), "tasks": ListOf(_TASK, MAX_TASKS)},
    "since": {"seq": Integer()},  # completions up to seq have arrived; also the sign of life
    "fetch": {"id": _ID},  # the tensors of a result; any client of the submitter's run may
    "read": {"file": _ID, "offset": Integer()},  # a piece of an announced file
    "release": {"ids": _IDS},  # nobody fetches these any more; repeated until `released`
    # hub -> client
    "attached": {
        "session": Text(64),  # a new one means that the hub knows nothing of this client's tasks
        "kinds": FreeMap(),  # what it offers: kind -> facts from its configuration
    },
    "accepted": {"ids": _IDS, "known": _IDS, "refused": ListOf(Tuple((_ID, Text())))},
    "finished": {
        "after": Integer(),  # the seq before these: a client that has not seen it knows that a message was lost
        "items": ListOf(_COMPLETION),
    },
    "released": {"ids": _IDS},
    "payload": {"id": _ID},  # a result, or `file@offset`
    "missing": {"id": _ID, "why": _REASON},
    # hub -> any, client -> hub
    "who": {},  # "I do not know this route: say hello or attach again"
    "reject": {"about": Integer(), "why": _REASON},
    "cancel": {"ids": _IDS, "why": _REASON},
}

WORKER_TO_HUB = frozenset({"hello", "beat", "result", "failed", "leave"})
HUB_TO_WORKER = frozenset({"welcome", "task", "ack", "stalled", "cancel", "bye", "who", "reject"})
CLIENT_TO_HUB = frozenset({"attach", "submit", "since", "fetch", "read", "release", "cancel"})
HUB_TO_CLIENT = frozenset({"attached", "accepted", "finished", "payload", "missing", "released", "who", "reject"})
TYPES_WITH_TENSORS = frozenset({"submit", "task", "result", "payload"})


def problem_in(value: Any, check: Check) -> str:
    """The error in a value, "" if there is none."""
    match check:
        case Text(max_chars):
            good = type(value) is str and len(value) <= max_chars
            return "" if good else f"is not a text of at most {max_chars} characters"
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
            return next((f"[{i}] {p}" for i, v in enumerate(value) if (p := problem_in(v, item))), "")
        case Tuple(items):
            if type(value) not in (list, tuple) or len(value) != len(items):
                return f"is not a list of {len(items)}"
            return next((f"[{i}] {p}" for i, v in enumerate(value) if (p := problem_in(v, items[i]))), "")
        case Record(items):
            if type(value) is not dict or value.keys() != items.keys():
                return f"is not a map of {', '.join(items)}"
            return next((f".{k} {p}" for k, c in items.items() if (p := problem_in(value[k], c))), "")
