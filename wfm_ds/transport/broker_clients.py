"""The part of the broker that communicates with clients, the processes that submit tasks.

Call its methods only in the broker's thread.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.ledger import Ledger
from wfm_ds.transport.messages import REASON_CHARS
from wfm_ds.transport.sockets import MessagePort, sender_key
from wfm_ds.transport.spool import NotInSpool, Spool, owner_run
from wfm_ds.transport.tasks import Completion, Task, TaskPayload, TaskRejected
from wfm_ds.transport.wire import MAX_HEADER_BYTES, Message, TensorSpec, WireError

CLIENT_TIMEOUT_S = 300.0  # the tasks of a client that is silent for longer are dropped
MAX_COMPLETION_BYTES = MAX_HEADER_BYTES - 4096
ADMISSIONS_PER_MESSAGE = 100  # each has an id and a reason; this many fit in one header


@dataclass(slots=True)
class _ClientState:
    epoch: int
    key: str
    route: bytes
    last_seen_s: float
    session: str = field(default_factory=lambda: uuid.uuid4().hex)  # constant while the broker remembers the client
    last_sent_seq: int = 0  # seq of the last completion sent


class BrokerClients:
    """The attached clients, indexed by route (zmq routing id) and by owner (RUN/CLIENT, as in ledger and spool)."""

    def __init__(
        self,
        port: MessagePort,
        ledger: Ledger,
        spool: Spool,
        *,
        kinds: dict[str, dict[str, Any]],
        cancel: Callable[[str, str, str], None],
    ) -> None:
        """kinds: {kind of task: information for clients}.
        cancel: called as cancel(worker, task_id, why) for each cancelled task that a worker is running.
        """
        self._port, self._ledger, self._spool = port, ledger, spool
        self._kinds, self._cancel = kinds, cancel
        self._owners_by_route: dict[bytes, str] = {}
        self._clients: dict[str, _ClientState] = {}

    def silence_by_owner(self, now_s: float) -> dict[str, float]:
        """Return {owner: seconds since the client's last message}."""
        return {owner: now_s - client.last_seen_s for owner, client in self._clients.items()}

    def receive_messages(self, now_s: float) -> None:
        self._port.receive_messages(self._handle_message, now_s)

    def drop_silent_clients(self, now_s: float) -> None:
        for owner in [o for o, silent_s in self.silence_by_owner(now_s).items() if silent_s > CLIENT_TIMEOUT_S]:
            self._drop_client(owner)

    def send_completions(self) -> None:
        for owner, client in self._clients.items():
            self._send_client_completions(owner, client)

    def _handle_message(self, route: bytes, message: Message, frames: list[zmq.Frame], now_s: float) -> None:
        fields = message.fields
        if message.type == "attach":
            self._attach_client(route, sender_key(frames[0]), message.message_id, fields, now_s)
            return
        owner = self._owners_by_route.get(route)
        if owner is None:
            self._port.send_message(route, "who", {})
            return
        self._clients[owner].last_seen_s = now_s
        run = owner_run(owner)
        if message.type == "submit":
            self._submit_tasks(route, owner, message, frames[1:], now_s)
        elif message.type == "since":
            self._ledger.release_completions(owner, fields["seq"])
            self._clients[owner].last_sent_seq = fields["seq"]
            if not self._ledger.new_completions(owner, fields["seq"]):
                self._port.send_message(route, "finished", {"after": fields["seq"], "items": []})  # a keep-alive reply
        elif message.type == "fetch":
            self._send_payload(route, fields["id"], lambda: self._spool.read_result(fields["id"], run))
        elif message.type == "read":
            name, offset = fields["file"], fields["offset"]
            self._send_payload(route, f"{name}@{offset}", lambda: self._spool.read_piece(name, offset))
        elif message.type == "release":
            self._spool.drop_results(fields["ids"], run)
            self._port.send_message(route, "released", {"ids": fields["ids"]})
        else:
            self._spool.drop_results(fields["ids"], run)
            self._cancel_running_tasks(self._ledger.cancel_tasks(owner, fields["ids"]), fields["why"])

    def _send_payload(
        self, route: bytes, name: str, read: Callable[[], tuple[Sequence[TensorSpec], Sequence[Any]]]
    ) -> None:
        try:
            specs, payload = read()
        except NotInSpool as error:
            self._port.send_message(route, "missing", {"id": name, "why": str(error)[:REASON_CHARS]})
            return
        self._port.send_message(route, "payload", {"id": name}, specs, payload)

    def _attach_client(self, route: bytes, key: str, mid: int, fields: Mapping[str, Any], now_s: float) -> None:
        owner = f"{fields['run']}/{fields['client']}"
        client = self._clients.get(owner)
        if client is not None and (client.key != key or fields["epoch"] < client.epoch):
            newer = f"a newer client {owner} is attached"
            why = newer if client.key == key else f"client {owner} is already attached with another key"
            self._port.send_message(route, "reject", {"about": mid, "why": why[:REASON_CHARS]})
            return
        if client is None or fields["epoch"] > client.epoch:
            self._drop_client(owner)  # a resumed run reuses ids, possibly for different data
            client = self._clients[owner] = _ClientState(fields["epoch"], key, route, now_s)
        self._owners_by_route.pop(client.route, None)
        self._owners_by_route[route] = owner
        client.route, client.last_seen_s = route, now_s
        client.last_sent_seq = 0  # messages to the old route may be lost
        self._port.send_message(route, "attached", {"session": client.session, "kinds": self._kinds})

    def _drop_client(self, owner: str) -> None:
        self._cancel_running_tasks(self._ledger.forget_owner(owner), "its client disconnected")
        self._spool.drop_owner(owner)
        client = self._clients.pop(owner, None)
        if client is not None:
            self._owners_by_route.pop(client.route, None)

    def _cancel_running_tasks(self, running: Iterable[tuple[str, str]], why: str) -> None:
        for worker, task_id in running:
            self._cancel(worker, task_id, why)

    def _submit_tasks(self, route: bytes, owner: str, message: Message, payload: list[zmq.Frame], now_s: float) -> None:
        rows, tasks = message.fields["rows"], message.fields["tasks"]
        if len(message.specs) not in (0, len(rows)) or not all(t["start"] < t["stop"] <= len(rows) for t in tasks):
            raise WireError("submit: its tasks, rows and tensors do not match")
        admissions: list[tuple[str, str | list[str]]] = []
        frame_at = [0, *itertools.accumulate(spec.num_frames for spec in message.specs)]
        for fields in tasks:
            part = slice(fields["start"], fields["stop"])
            specs = message.specs[part]
            frames = payload[frame_at[part.start] : frame_at[part.stop]] if specs else []
            content = TaskPayload(rows[part], specs, tuple(frames), now_s)
            num_bytes, num_rows = sum(spec.nbytes for spec in specs), part.stop - part.start
            task = Task(fields["id"], owner, fields["kind"], num_bytes, now_s + fields["deadline_s"], content, num_rows)
            try:
                admissions.append(("ids" if self._ledger.submit(task) else "known", task.id))
            except TaskRejected as error:
                admissions.append(("refused", [task.id, str(error)]))
        for start in range(0, len(admissions), ADMISSIONS_PER_MESSAGE):
            batch = admissions[start : start + ADMISSIONS_PER_MESSAGE]
            lists = {key: [value for k, value in batch if k == key] for key in ("ids", "known", "refused")}
            self._port.send_message(route, "accepted", lists)

    def _send_client_completions(self, owner: str, client: _ClientState) -> None:
        items = self._ledger.new_completions(owner, client.last_sent_seq)
        while items:
            batch: list[dict[str, Any]] = []
            size = 0
            for item in items:
                fields = {name: getattr(item, name) for name in Completion.__slots__}
                size += len(wire.pack_value(fields))
                if batch and size > MAX_COMPLETION_BYTES:
                    break
                batch.append(fields)
            if not self._port.send_message(client.route, "finished", {"after": client.last_sent_seq, "items": batch}):
                return
            client.last_sent_seq = batch[-1]["seq"]
            items = items[len(batch) :]
