"""Schemas of all messages, with the purpose of each key. wire.py rejects messages that do not match a schema.

A *task* is a piece of work for one worker: a range of the *rows* of a submission. A row is a small map, plus the tensor
with the same index in the submission's tensor table. Several tasks can refer to the same row, so an image is sent only
once for all rewards.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, create_model

MAX_ROWS = 64  # per submission
MAX_TASKS = 1024  # per submission
MAX_ITEMS = 4096  # in any other list
ID_CHARS = 300
REASON_CHARS = 300
DETAIL_CHARS = 8000  # a traceback
META_BYTES = 32 * 1024  # limit of a result's meta: half a header, so that the broker can forward it

Id: TypeAlias = Annotated[str, Field(max_length=ID_CHARS)]
Ids: TypeAlias = Annotated[list[Id], Field(max_length=MAX_ITEMS)]
ShortId: TypeAlias = Annotated[str, Field(max_length=64)]
ClientName: TypeAlias = Annotated[str, Field(max_length=120)]
Reason: TypeAlias = Annotated[str, Field(max_length=REASON_CHARS)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Number: TypeAlias = Annotated[int, Field(ge=1, lt=2**63)]  # counts from 1
Seconds: TypeAlias = Annotated[float, Field(ge=0)]
FreeMap: TypeAlias = dict[Any, Any]  # anything that msgpack can encode; limited only by the size of a header
Rows: TypeAlias = Annotated[list[FreeMap], Field(max_length=MAX_ROWS)]
Progress: TypeAlias = Annotated[tuple[Id, Number, Count, Count], Field(strict=False)]  # task id, attempt, done, total
Refusal: TypeAlias = Annotated[tuple[Id, Id], Field(strict=False)]  # task id, reason


def _schema(**fields: Any) -> type[BaseModel]:
    """Return a pydantic model with exactly these required fields. Values are not converted to other types."""
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    required: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return create_model("Schema", __config__=config, **required)


_TASK = _schema(
    id=Id,  # equal ids mean equal work, so submissions can be repeated
    kind=Id,  # selects the workers, e.g. score:ocr
    start=Annotated[int, Field(ge=0, le=MAX_ROWS)],  # rows [start, stop) of the submission
    stop=Annotated[int, Field(ge=1, le=MAX_ROWS)],
    deadline_s=Seconds,  # remaining seconds, independent of the peers' clocks
)
_COMPLETION = _schema(
    seq=Number,  # counts the submitter's completions; `since` requests those after a seq
    id=Id,
    ok=bool,
    worker=Id,
    attempt=Count,
    seconds=Seconds,
    meta=FreeMap,
    reason=Reason,  # of a failure; empty if ok
)

SCHEMAS: dict[str, type[BaseModel]] = {
    # worker -> broker
    "hello": _schema(
        worker=ShortId,  # the logical id; unlike the route, it survives reconnections
        life=ShortId,  # one per process: a new value means that the previous process died
        name=Id,  # for display
        kinds=Annotated[list[Id], Field(max_length=64)],
        credit=Annotated[int, Field(ge=1, le=1024)],  # rows it can hold at once
        held=Ids,  # ids of the tasks it has; other tasks leased to it were lost in transit
    ),
    "beat": _schema(progress=Annotated[list[Progress], Field(max_length=MAX_ITEMS)]),
    "result": _schema(id=Id, attempt=Number, seconds=Seconds, meta=FreeMap),
    "failed": _schema(
        id=Id,
        attempt=Number,
        reason=Reason,
        detail=Annotated[str, Field(max_length=DETAIL_CHARS)],
        fatal=bool,  # True: do not try again
    ),
    "leave": _schema(why=Reason),  # the worker returns its tasks unfinished
    # broker -> worker
    "welcome": _schema(hub=ShortId, beat_s=Seconds),  # `hub` changes at each start of the broker
    "task": _schema(
        id=Id,
        attempt=Number,  # lease number; not every lease counts as a failed attempt
        kind=Id,
        rows=Rows,
        note=FreeMap,  # the last announcement of the broker's owner, e.g. the weights to use
    ),
    "ack": _schema(ids=Ids),
    "stalled": _schema(id=Id, attempt=Number),  # no progress on this lease; perhaps the task has not arrived
    "bye": _schema(why=Reason),  # all work is done: leave
    # client -> broker
    "attach": _schema(run=ClientName, client=ClientName, epoch=Count),  # a restarted client has a higher epoch
    "submit": _schema(rows=Rows, tasks=Annotated[list[_TASK], Field(max_length=MAX_TASKS)]),  # type: ignore[valid-type]
    "since": _schema(seq=Count),  # completions up to seq have arrived; also the keep-alive
    "fetch": _schema(id=Id),  # the tensors of a result, for any client of the submitter's run
    "read": _schema(file=Id, offset=Count),  # a piece of an announced file
    "release": _schema(ids=Ids),  # these results are no longer needed; repeated until `released`
    # broker -> client
    "attached": _schema(
        session=ShortId,  # a new value means that the broker has none of this client's tasks
        kinds=FreeMap,  # task kinds offered -> information from the configuration
    ),
    "accepted": _schema(ids=Ids, known=Ids, refused=Annotated[list[Refusal], Field(max_length=MAX_ITEMS)]),
    "finished": _schema(
        after=Count,  # the seq before these items; lets clients detect lost messages
        items=Annotated[list[_COMPLETION], Field(max_length=MAX_ITEMS)],  # type: ignore[valid-type]
    ),
    "released": _schema(ids=Ids),
    "payload": _schema(id=Id),  # a result, or `file@offset`
    "missing": _schema(id=Id, why=Reason),
    # broker -> any, client -> broker
    "who": _schema(),  # unknown route: send `hello` or `attach` again
    "reject": _schema(about=Count, why=Reason),
    "cancel": _schema(ids=Ids, why=Reason),
}

WORKER_TO_BROKER = frozenset({"hello", "beat", "result", "failed", "leave"})
BROKER_TO_WORKER = frozenset({"welcome", "task", "ack", "stalled", "cancel", "bye", "who", "reject"})
CLIENT_TO_BROKER = frozenset({"attach", "submit", "since", "fetch", "read", "release", "cancel"})
BROKER_TO_CLIENT = frozenset({"attached", "accepted", "finished", "payload", "missing", "released", "who", "reject"})
TYPES_WITH_TENSORS = frozenset({"submit", "task", "result", "payload"})
