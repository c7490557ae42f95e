"""Malformed messages drawn from a seed. The fuzz tests send them to the client and worker ports of the broker."""

import random
from collections import Counter

import msgpack
import numpy as np
import zmq

from wfm_ds.transport import wire
from wfm_ds.transport.messages import BROKER_TO_CLIENT, BROKER_TO_WORKER, CLIENT_TO_BROKER, WORKER_TO_BROKER
from wfm_ds.transport.sockets import Dealer, receive_frames
from wfm_ds.transport.wire import MAX_FRAMES, MAX_HEADER_BYTES, WireError

WINDOW = 16  # messages sent before reading answers: the broker drops answers that do not fit into a full pipe
PATIENCE_S = 60.0

WHOLE = {
    "attach": {"run": "fuzz", "client": "drawn", "epoch": 1},
    "submit": {
        "rows": [{"id": "s", "prompt": "a cat"}],
        "tasks": [{"id": "t", "kind": "unknown", "start": 0, "stop": 1, "deadline_s": 1.0}],
    },
    "since": {"seq": 0},
    "fetch": {"id": "nothing"},
    "read": {"file": "nothing", "offset": 0},
    "release": {"ids": ["a", "b"]},
    "cancel": {"ids": ["a"], "why": "fuzz"},
    "hello": {"worker": "w", "life": "1", "name": "w", "kinds": ["unknown"], "credit": 1, "held": []},
    "beat": {"progress": [["t", 1, 0, 1]]},
    "result": {"id": "t", "attempt": 1, "seconds": 0.1, "meta": {"a": 1}},
    "failed": {"id": "t", "attempt": 1, "reason": "no", "detail": "", "fatal": False},
}


def odd_value(draw):
    """Draw an edge-case value for any field of a message."""
    nest = []
    for _ in range(draw.randrange(40)):
        nest = [nest] if draw.random() < 0.5 else {"k": nest}
    return draw.choice([
        None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.5, float("nan"), float("inf"), "", "x" * 400,
        "\x00", "\U0001f600" * 20, b"bytes", [], {}, [None] * 5000, {"k": {}}, {1: 2}, {b"k": 1}, nest,
        msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), draw.randbytes(20).decode("latin-1"),
    ])  # fmt: skip


def odd_table(draw):
    """Draw a tensor table with a wrong name, dtype, shape or structure."""
    line = ["media", "uint8", [2, 3]]
    at = draw.randrange(4)
    if at < 3:
        line[at] = draw.choice([
            "", "x" * 100, "object", "float64", "complex64", -1, 0, 2**31, 2**62, [2**31 - 1] * 8, [0], [1] * 9,
            [-1, -6], [], "6", None, 6.0, [[2], 3], 10 * 2**30,
        ])  # fmt: skip
    return draw.choice([[line], [line] * draw.randrange(70), line, {}, "table", [line[:2]], [[]]])


def whole(draw, types):
    """Draw a valid message. Return its fields and the frames after the header."""
    name = draw.choice(sorted(types & WHOLE.keys()))
    fields = {"v": wire.PROTOCOL_VERSION, "t": name, "mid": draw.randrange(2**40), **WHOLE[name]}
    if name not in ("submit", "result") or draw.random() < 0.5:
        return fields, []
    specs, frames = wire.pack_tensors([("media", np.frombuffer(draw.randbytes(48), np.uint8))])
    fields["tensors"] = specs
    return fields, [bytes(frame) for frame in frames]


def mutated(fields, draw):
    """Return a copy of the fields with one random error."""
    fields = dict(fields)
    key = draw.choice(sorted(fields))
    kind = draw.randrange(5)
    if kind == 0:
        del fields[key]
    elif kind == 1:
        fields[draw.choice(["more", "", "v2", "x" * 300])] = odd_value(draw)
    elif kind == 2:
        fields["tensors"] = odd_table(draw)
    elif kind == 3 and isinstance(fields[key], list) and fields[key] and isinstance(fields[key][0], dict):
        fields[key] = [dict(fields[key][0]) | {draw.choice(sorted(fields[key][0])): odd_value(draw)}]
    else:
        fields[key] = odd_value(draw)
    return fields


def damaged(blob, draw):
    """Flip, remove, append or insert bytes."""
    blob = bytearray(blob)
    kind = draw.randrange(4)
    if kind == 0 and blob:
        blob[draw.randrange(len(blob))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del blob[draw.randrange(len(blob) + 1) :]
    elif kind == 2:
        blob += draw.randbytes(draw.choice([1, 7, 300, MAX_HEADER_BYTES]))
    else:
        at = draw.randrange(len(blob) + 1)
        blob[at:at] = draw.randbytes(draw.randrange(9))
    return bytes(blob)


def a_message(draw, types):
    """Draw the frames of a message. Most draws are invalid, some are valid."""
    kind = draw.randrange(7)
    fields, payload = whole(draw, types)
    if kind == 0:
        return [draw.randbytes(draw.randrange(300)) for _ in range(1 + draw.randrange(5))]
    if kind == 1:
        return [damaged(msgpack.packb(fields), draw), *payload]
    if kind == 2:
        wrong = [damaged(frame, draw) for frame in payload] + [b"x"] * draw.choice([0, 1, 3, MAX_FRAMES])
        return [msgpack.packb(fields), *wrong]
    if kind == 3:
        return [msgpack.packb(fields), *payload]
    return [msgpack.packb(mutated(fields, draw)), *payload]


def bombard(endpoint, count, seed, *, workers=False):
    """Send `count` random messages and read all answers.

    Returns the number of answers by type, and the number of messages that `wire.decode_message` rejects.
    """
    types, answers = (WORKER_TO_BROKER, BROKER_TO_WORKER) if workers else (CLIENT_TO_BROKER, BROKER_TO_CLIENT)
    draw, context, told = random.Random(seed), zmq.Context(), Counter()
    dealer, invalid = Dealer(context, endpoint), 0
    dealer.socket.set(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
    probe = msgpack.packb(
        {"v": wire.PROTOCOL_VERSION, "t": "no type", "mid": 1}
    )  # always rejected; the answer shows that all earlier messages were read
    try:
        for number in range(count):
            frames = a_message(draw, types)
            try:
                wire.decode_message(frames, types)
            except WireError:
                invalid += 1
            dealer.socket.send_multipart(frames)
            if number % WINDOW == WINDOW - 1 or number == count - 1:
                dealer.socket.send(probe)
                invalid += 1
                while not hear(dealer, answers, told):
                    pass
    finally:
        dealer.close()
        context.term()
    return told, invalid


def hear(dealer, answers, told):
    """Count the received answers by type. Return whether the answer to the probe was among them."""
    assert dealer.socket.poll(PATIENCE_S * 1000), "the hub does not answer"
    while (frames := receive_frames(dealer.socket)) is not None:
        message = wire.decode_message([frame.buffer for frame in frames], answers)
        # An attach from an older client is a valid message. The broker rejects it but does not count it as malformed.
        refused = message.type == "reject" and message.fields["why"].startswith("a newer client")
        told["refused" if refused else message.type] += 1
        if message.type == "reject" and "'no type'" in message.fields["why"]:
            return True
    return False
