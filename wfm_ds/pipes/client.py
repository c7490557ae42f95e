"""The client: submits tasks to the broker and receives their outcomes. A background thread does all socket work.

The client is the source of truth. It repeats a submission until the broker accepts it, and resubmits all unfinished
tasks after a broker restart. Every task ends in exactly one TaskOutcome unless it is cancelled.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from wfm_ds.chunks import chunks
from wfm_ds.pipes import wire
from wfm_ds.pipes.clock import OwnClock
from wfm_ds.pipes.keys import ClientKeys
from wfm_ds.pipes.messages import HUB_TO_CLIENT
from wfm_ds.pipes.requests import Request, Requests
from wfm_ds.pipes.sockets import Dealer, Full, Mailbox, NotAllowed, PipeError, check_endpoint
from wfm_ds.pipes.throttle import Throttle
from wfm_ds.pipes.unfinished import RESUBMIT_S, Submission, TaskRequest, Unfinished
from wfm_ds.pipes.wire import Array, Buffer, Message, WireError

log = logging.getLogger(__name__)

POLL_MS = 100
ATTACH_S = 0.1  # between attempts to attach; each one looks up the broker's address again
REFUSED_S = 5.0  # `attach` fails early if the broker still rejects the client after this time
SINCE_S = 2.0  # between `since` messages, which also keep the session alive
RELEASE_AGAIN_S = 2.0  # a `release` is repeated until the broker confirms it
IDS_PER_MESSAGE = 100
MAX_MID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Result of a task: `meta` is the worker's return value; `reason` explains a failure."""

    id: str
    ok: bool
    seconds: float
    meta: Mapping[str, Any]
    reason: str


class PipeClient:
    """One submitter. Call the methods from a single thread, except `close`, which is safe from any thread."""

    def __init__(self, endpoint: str, *, run: str, client: str, keys: ClientKeys | None = None) -> None:
        """Start the background thread.

        `endpoint` is an ipc:// or tcp:// address, or the path of a pipes.json that is re-read when the connection is
        lost. (run, client) identifies the submitter; a newer client with the same identity replaces the older one.
        Raises PipeError if the address is not allowed.
        """
        self.endpoint = endpoint if "://" not in endpoint else check_endpoint(endpoint, keys=keys is not None)
        self._keys = keys
        self.kinds: dict[str, dict[str, Any]] = {}  # task kinds offered by the broker; set by `attach`
        self._identity = {"run": run, "client": client, "epoch": time.time_ns()}
        self._commands: Mailbox[Callable[[], None]] = Mailbox()
        self._changed = threading.Condition()
        self._outcomes: list[TaskOutcome] = []
        self._stopping = False
        self._silent_s = 0.0
        self._trouble = "not connected yet"
        self._refused_at_s = float("-inf")  # time of the last rejection
        # Used only by the background thread:
        self._context: zmq.Context[Any] = zmq.Context()
        self._dealer: Dealer | None = None
        self._session = ""  # while attached
        self._last_session = ""
        self._seq = 0
        self._clock = OwnClock(time.monotonic())
        self._heard_at_s = self._clock.now_s
        self._mids = itertools.count(1)
        self._complaints = Throttle(log.warning)
        self._unfinished = Unfinished()
        self._requests = Requests(f"mark/{self._identity['epoch']}")
        self._releasing: dict[str, float] = {}  # task id -> time of the last `release` message
        self._arrived: dict[str, Message | str] = {}  # payload or the reason it is missing; guarded by self._condition
        self._attach_at_s = self._since_at_s = float("-inf")
        self._thread = threading.Thread(target=self._talk, name="pipes", daemon=True)
        self._thread.start()

    def attach(self, timeout_s: float) -> None:
        """Wait for the broker's first reply, which sets `kinds`.

        Raises PipeError after timeout_s, or earlier if the broker rejects this client (wrong, missing or extra keys).
        """
        refused_s = self.now_s() + min(REFUSED_S, timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._last_session or self._refused_at_s >= refused_s, timeout_s)
            if not self._last_session:
                refused = self._refused_at_s >= refused_s
                raise PipeError(self._trouble if refused else f"no reply within {timeout_s:g} s: {self._trouble}")

    def submit(
        self, rows: Sequence[Mapping[str, Any]], tensors: Sequence[tuple[str, Array]], tasks: Sequence[TaskRequest]
    ) -> None:
        """Queue tasks over these rows (one tensor per row, or none) and return immediately.

        Do not modify the arrays until the tasks have ended. Raises WireError if they do not fit in one message.
        """
        specs, frames = wire.pack_tensors(tensors)
        by_id = {task.id: task for task in tasks}
        submission = Submission(rows, specs, list(itertools.chain(*frames)), by_id, set(by_id))
        submission.encode(MAX_MID, self.now_s())  # the largest possible header: checks the size limit
        self._commands.put(lambda: self._unfinished.add(submission))

    def take(self, timeout_s: float) -> list[TaskOutcome]:
        """Return the outcomes since the last call. Waits up to timeout_s for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes, max(0.0, timeout_s))
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel tasks. They have no outcome, except one that is already on its way."""
        task_ids = list(ids)
        if task_ids:
            self._commands.put(lambda: self._cancel(task_ids))

    def fetch(self, ids: Iterable[str], timeout_s: float) -> dict[str, Message]:
        """Fetch results by task id, including those submitted by other clients of this run.

        Read the tensors with Message.read_tensors. Raises PipeError if a result is missing, or if none arrives within
        timeout_s.
        """
        return self._collect({task_id: Request("fetch", {"id": task_id}) for task_id in ids}, timeout_s)

    def read_file(self, name: str, num_bytes: int, timeout_s: float) -> Iterator[Array]:
        """Yield an announced file of num_bytes bytes in uint8 pieces.

        Raises PipeError if a piece does not arrive within timeout_s, and WireError if its checksum is wrong.
        """
        for offset in range(0, num_bytes, wire.FRAME_BYTES):
            key = f"{name}@{offset}"
            request = Request("read", {"file": name, "offset": offset})
            yield self._collect({key: request}, timeout_s)[key].tensors()[0]

    def release(self, ids: Iterable[str]) -> None:
        """Allow the broker to drop the tensors of these results."""
        task_ids = list(ids)
        self._commands.put(lambda: self._release(task_ids))

    def now_s(self) -> float:
        """Return time.monotonic() minus the time this process was suspended. Use it for deadlines of replies."""
        return self._clock.now_s if self._thread.is_alive() else time.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since the last message from the broker, measured after all arrived messages were read."""
        return self._silent_s

    def trouble(self) -> str:
        """Return the last known connection problem."""
        return self._trouble

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel open tasks and disconnect."""
        self._commands.put(self._leave)
        self._thread.join(timeout_s)

    def _collect(self, requests: dict[str, Request], timeout_s: float) -> dict[str, Message]:
        self._commands.put(lambda: self._requests.add(requests))
        with self._changed:
            is_complete = self._await_all(requests.keys(), timeout_s)
            replies = {key: self._arrived.pop(key) for key in requests.keys() & self._arrived.keys()}
        if not is_complete:
            self._commands.put(lambda: self._give_up(requests))
            missing = sorted(requests.keys() - replies.keys())
            why = self._trouble if self._silent_s > timeout_s else "the broker did not send them"
            raise PipeError(f"no payload arrived for {timeout_s:g} s, {len(missing)} missing, e.g. {missing[0]}: {why}")
        messages = {key: reply for key, reply in replies.items() if not isinstance(reply, str)}
        if len(messages) < len(replies):
            raise PipeError("; ".join(reply for reply in replies.values() if isinstance(reply, str)))
        return messages

    def _await_all(self, wanted: Set[str], silence_s: float) -> bool:
        """Return True when all have arrived, False if none arrives for silence_s. Call with self._condition held."""
        while missing := wanted - self._arrived.keys():
            if not self._changed.wait_for(functools.partial(self._any_of, missing), silence_s):
                return False
        return True

    def _any_of(self, wanted: Set[str]) -> bool:
        return not wanted.isdisjoint(self._arrived)

    # Methods of the background thread

    def _give_up(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._requests.close(key)
            with self._changed:
                self._arrived.pop(key, None)  # arrived too late for the caller

    def _talk(self) -> None:
        try:
            while not self._stopping:
                self._wait()
                now_s = self._clock.look(time.monotonic())
                self._complaints.look(now_s)
                for command in self._commands.take():
                    command()
                while self._dealer is not None and (frames := self._dealer.receive()) is not None:
                    self._from_hub(frames, now_s)
                self._silent_s = now_s - self._heard_at_s
                if not self._session:
                    self._try_to_attach(now_s)
                else:
                    self._keep_in_touch(now_s)
        finally:
            if self._dealer is not None:
                self._dealer.close()
            self._context.term()  # bounded by the socket's linger
            self._commands.close()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._commands.fileno(), zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer.socket, zmq.POLLIN)
        poller.poll(POLL_MS)

    def _try_to_attach(self, now_s: float) -> None:
        if now_s - self._attach_at_s < ATTACH_S:
            return
        self._attach_at_s = now_s
        try:
            endpoint = locate(self.endpoint, keys=self._keys is not None)
        except NotAllowed as error:
            self._refused(str(error), now_s)
            return
        except PipeError as error:
            self._trouble = str(error)
            return
        refusal = self._dealer.trouble() if self._dealer is not None else ""
        if self._dealer is None or self._dealer.endpoint != endpoint or self._dealer.stale():
            if self._dealer is not None:
                self._dealer.close()
            self._dealer = Dealer(self._context, endpoint, self._keys)
        was_sent = self._send("attach", self._identity)
        if refusal:
            self._refused(f"{endpoint}: {refusal}", now_s)
        elif self._dealer.settled() or not self._trouble.startswith(f"{endpoint}: "):
            self._trouble = f"{endpoint} does not reply" if was_sent else f"nothing listens at {endpoint}"

    def _refused(self, why: str, now_s: float) -> None:
        with self._changed:
            self._trouble, self._refused_at_s = why, now_s
            self._changed.notify_all()

    def _keep_in_touch(self, now_s: float) -> None:
        for submission in self._unfinished.due(now_s):
            header = submission.encode(next(self._mids), now_s)
            if not self._send_frames(header, submission.frames):
                return
            submission.retry_at_s = now_s + RESUBMIT_S
        self._requests.send(now_s, self._send)
        self._repeat_releases(now_s)
        if now_s - self._since_at_s > SINCE_S and self._send("since", {"seq": self._seq}):
            self._since_at_s = now_s

    def _from_hub(self, frames: list[zmq.Frame], now_s: float) -> None:
        try:
            message = wire.decode([frame.buffer for frame in frames], HUB_TO_CLIENT)
        except WireError as error:
            self._complaints.tell(error.reason, f"dropped a message from the broker: {error}", now_s)
            return
        self._heard_at_s = now_s
        fields = message.fields
        if message.type == "attached":
            self._attached(fields)
        elif message.type == "who":
            self._session = ""
        elif message.type == "accepted":
            self._accepted(fields, now_s)
        elif message.type == "finished":
            for item in fields["items"]:
                self._finish(TaskOutcome(item["id"], item["ok"], item["seconds"], item["meta"], item["reason"]))
            if fields["items"]:
                if fields["after"] <= self._seq:  # else a message was lost, and the broker resends
                    self._seq = max(self._seq, fields["items"][-1]["seq"])
                self._since_at_s = float("-inf")  # acknowledge immediately: a stopping broker waits for it
        elif message.type in ("payload", "missing"):
            if self._requests.close(fields["id"]):  # else a duplicate
                with self._changed:
                    self._arrived[fields["id"]] = message if message.type == "payload" else fields["why"]
                    self._changed.notify_all()
        elif message.type == "released":
            self._requests.released(fields["ids"])
            for task_id in fields["ids"]:
                self._releasing.pop(task_id, None)
        elif not self._session:
            self._refused(fields["why"], now_s)
        else:
            self._trouble = fields["why"]
            self._complaints.tell("rejected", f"the broker rejected a message: {fields['why']}", now_s)

    def _attached(self, fields: Mapping[str, Any]) -> None:
        self._session = fields["session"]
        if self._session != self._last_session:  # the broker was restarted or dropped this client
            self._seq = 0
            self._releasing.clear()
            self._unfinished.forgotten()
        with self._changed:
            self.kinds, self._last_session = fields["kinds"], self._session
            self._changed.notify_all()

    def _accepted(self, fields: Mapping[str, Any], now_s: float) -> None:
        self._unfinished.accepted((*fields["ids"], *fields["known"]))
        for task_id, why in fields["refused"]:
            if why == "full":
                self._unfinished.full(task_id, now_s)
            else:
                self._finish(TaskOutcome(task_id, False, 0.0, {}, f"rejected: {why}"))

    def _finish(self, outcome: TaskOutcome) -> None:
        if self._unfinished.drop(outcome.id):  # else a duplicate
            with self._changed:
                self._outcomes.append(outcome)
                self._changed.notify_all()

    def _cancel(self, ids: Iterable[str]) -> None:
        self._send_ids(
            "cancel", [task_id for task_id in ids if self._unfinished.drop(task_id)], why="cancelled by the client"
        )

    def _release(self, ids: Sequence[str]) -> None:
        self._releasing.update(dict.fromkeys(ids, float("-inf")))
        self._repeat_releases(self._clock.now_s)

    def _repeat_releases(self, now_s: float) -> None:
        """Resend unconfirmed releases. If a release is lost, the broker keeps the tensors forever."""
        due = [task_id for task_id, sent_at_s in self._releasing.items() if now_s - sent_at_s > RELEASE_AGAIN_S]
        for batch in chunks(due, IDS_PER_MESSAGE):
            if not self._send("release", {"ids": batch}):
                return
            self._releasing.update(dict.fromkeys(batch, now_s))

    def _send_ids(self, message_type: str, ids: Sequence[str], **fields: str) -> None:
        for batch in chunks(ids, IDS_PER_MESSAGE):
            self._send(message_type, {"ids": list(batch), **fields})

    def _leave(self) -> None:
        self._cancel(self._unfinished.ids())
        self._send_ids("release", list(self._releasing))
        self._send("since", {"seq": self._seq})
        self._stopping = True

    def _send(self, message_type: str, fields: Mapping[str, Any]) -> bool:
        return self._send_frames(wire.encode(message_type, next(self._mids), fields))

    def _send_frames(self, header: bytes, payload: Sequence[Buffer] = ()) -> bool:
        """Send a message. Returns False and detaches if no broker accepts it: the next one may be a new broker."""
        try:
            if self._dealer is not None:
                self._dealer.send(header, payload)
                return True
        except Full:
            self._session = ""
        return False


def locate(endpoint: str, *, keys: bool = False) -> str:
    """Return the client address: `endpoint` itself, or the address in that pipes.json. Raises PipeError."""
    if "://" in endpoint:
        return check_endpoint(endpoint, keys=keys)
    try:
        content = json.loads(Path(endpoint).read_text())
    except FileNotFoundError as error:
        raise PipeError(f"{endpoint} does not exist; the service writes it when it is ready") from error
    except (OSError, ValueError) as error:
        raise PipeError(f"{endpoint} cannot be read: {error}") from error
    address = content.get("clients") if isinstance(content, dict) else None
    if not isinstance(address, str):
        raise PipeError(f"{endpoint} has no address for `clients`")
    return check_endpoint(address, keys=keys)
