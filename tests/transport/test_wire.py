"""Messages come back as they were encoded; any other bytes are a WireError and nothing else."""

import contextlib
import math
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wfm_ds.transport import wire
from wfm_ds.transport.messages import CLIENT_TO_BROKER, SCHEMAS
from wfm_ds.transport.wire import MAX_FRAME_BYTES, MAX_HEADER_BYTES, WireError

ALL = frozenset(SCHEMAS)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 200, shape).astype(dtype),
    st.sampled_from(sorted(wire.DTYPES)),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 9),
)


def submit(rows, tensors, mid=7):
    specs, frames = wire.pack_tensors([("media", t) for t in tensors])
    task = {"id": "t/1", "kind": "score:x", "start": 0, "stop": 1, "deadline_s": 5}
    header = wire.encode_header("submit", mid, {"rows": rows, "tasks": [task]}, specs)
    return [header, *(frame for each in frames for frame in each)]


def raw(header):
    packed = msgpack.packb(header)
    return struct.pack("<I", wire.compute_checksum(packed)) + packed


def since(**changes):
    return {"v": 1, "t": "since", "mid": 1, "seq": 0, **changes}


@given(
    st.lists(st.dictionaries(st.text("abc", max_size=3), plain, max_size=3), max_size=3), st.lists(arrays, max_size=3)
)
@settings(max_examples=80, deadline=None)
def test_decoding_gives_back_what_was_encoded(rows, tensors):
    message = wire.decode_message([bytes(frame) for frame in submit(rows, tensors)], ALL)
    assert (message.type, message.message_id, message.fields["rows"]) == ("submit", 7, rows)
    for got, want in zip(message.read_tensors(), tensors, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_mutated_byte_is_noticed(data):
    frames = [bytearray(frame) for frame in submit([{"a": "b"}], [np.arange(5, dtype=np.int32)])]
    frame = data.draw(st.sampled_from(frames))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        wire.decode_message([bytes(f) for f in frames], ALL).read_tensors()


@given(st.lists(st.binary(max_size=60), max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_a_wire_error(frames, with_checksum):
    if with_checksum and frames:
        frames[0] = struct.pack("<I", wire.compute_checksum(frames[0])) + frames[0]
    with pytest.raises(WireError):
        wire.decode_message(frames, ALL)


@given(plain, st.sampled_from(sorted(SCHEMAS)), st.sampled_from(["ids", "rows", "progress", "tensors", "mid", "v"]))
@settings(max_examples=200, deadline=None)
def test_any_value_at_any_key_is_a_wire_error_or_a_message(value, message_type, key):
    header = {"v": 1, "t": message_type, "mid": 1, **dict.fromkeys(SCHEMAS[message_type], value), key: value}
    with contextlib.suppress(WireError):
        assert wire.decode_message([raw(header)], ALL).type == message_type


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def media(**changes):
    line = {"name": "m", "dtype": "uint8", "shape": [4], "nbytes": 4, "check": wire.compute_checksum(b"abcd")} | changes
    return {"v": 1, "t": "submit", "mid": 1, "rows": [{}], "tasks": [], "tensors": [list(line.values())]}


@pytest.mark.parametrize(
    ("header", "frames", "says"),
    [
        (since(v=2), [], "protocol"),
        (since(t="explode"), [], "not expected here"),
        (since(t=["since"]), [], "not expected here"),
        (since(mid=-1), [], "mid"),
        (since(mid=True), [], "mid"),
        (since(more=1), [], "more"),
        ({"v": 1, "t": "since", "mid": 1}, [], "seq"),
        (since(seq="0"), [], "integer"),
        (since(seq=-1), [], "integer"),
        (since(seq=nested(30)), [], "nested deeper"),
        (since(seq=math.nan), [], "non-finite number"),
        (since(seq=math.inf), [], "non-finite number"),
        (since(seq=msgpack.ExtType(4, b"x")), [], "not msgpack"),
        (since(seq=b"bytes"), [], "not msgpack"),
        (since(seq={b"key": 1}), [], "not msgpack"),
        ([1, 2], [], "not a map"),
        (since(), [b"surplus"], "frames of"),
        (since(tensors=[["m", "uint8", [1], 1, 0]]), [b"a"], "cannot have tensors"),
        (media(), [], "frames of"),
        (media(), [b"abc"], "frames of"),
        (media(), [b"ab", b"cd"], "frames of"),
        (media(dtype="object"), [b"abcd"], "unsupported dtype"),
        (media(shape=[-4]), [b"abcd"], "shape"),
        (media(shape=[2**31]), [b"abcd"], "shape"),
        (media(shape=[2]), [b"abcd"], "do not match"),
        (media(shape=["4"]), [b"abcd"], "non-integer"),
        (media(shape=[2**30, 4], nbytes=2**32), [b"abcd"], "more than"),
        (media(nbytes=5, shape=[5]), [b"abcd"], "frames of"),
        (media(check=2**32), [b"abcd"], "do not match"),
        (media() | {"tensors": [["m"]] * 65}, [], "at most 64"),
    ],
)
def test_a_bad_message_is_named(header, frames, says):
    with pytest.raises(WireError, match=says):
        wire.decode_message([raw(header), *frames], CLIENT_TO_BROKER)


def test_limits_of_frames_and_header():
    with pytest.raises(WireError, match="0 frames"):
        wire.decode_message([], ALL)
    with pytest.raises(WireError, match="322 frames"):
        wire.decode_message([raw(since())] * 322, ALL)
    with pytest.raises(WireError, match="header of"):
        wire.decode_message([b"x" * (MAX_HEADER_BYTES + 1)], ALL)
    packed = msgpack.packb(since()) + b"\x01"
    with pytest.raises(WireError, match="not msgpack"):
        wire.decode_message([struct.pack("<I", wire.compute_checksum(packed)) + packed], ALL)
    with pytest.raises(WireError, match="header of 7"):
        submit([{"prompt": "x" * 70000}], [])


@pytest.mark.parametrize(
    "value",
    [math.nan, 2**63, b"x", {1: 2}, object(), np.float32(1), "\ud800", nested(20)],
    ids=lambda v: type(v).__name__,
)
def test_the_sender_refuses_what_the_receiver_would(value):
    with pytest.raises(WireError):
        submit([{"value": value}], [])


def test_a_type_for_the_other_direction_is_refused():
    with pytest.raises(WireError, match="not expected here"):
        wire.decode_message([wire.encode_header("who", 1, {})], CLIENT_TO_BROKER)


def test_large_tensors_are_cut_into_frames_and_copied_aligned():
    big = np.arange(MAX_FRAME_BYTES // 2 + 3, dtype=np.int64).reshape(-1)
    header, *frames = submit([{}], [big])
    assert [len(f) for f in frames] == [MAX_FRAME_BYTES] * 4 + [24]
    shifted = [memoryview(b"x" + bytes(f))[1:] for f in frames]  # as odd as what zmq hands out
    got = wire.decode_message([header, *shifted], ALL).read_tensors()[0]
    np.testing.assert_array_equal(got, big)
    assert got.flags.aligned
    assert got.flags.writeable


def test_non_contiguous_arrays_and_unknown_dtypes():
    array = np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2]
    got = wire.decode_message([bytes(f) for f in submit([{}], [array])], ALL).read_tensors()[0]
    np.testing.assert_array_equal(got, array)
    with pytest.raises(WireError, match="unsupported dtype complex64"):
        wire.pack_tensors([("media", np.zeros(1, np.complex64))])


@pytest.mark.parametrize("message_type", sorted(SCHEMAS))
def test_no_message_uses_a_name_of_the_header(message_type):
    assert not SCHEMAS[message_type].keys() & wire.RESERVED_KEYS


def test_a_refusal_arrives_with_its_reason():
    header = wire.encode_header("reject", 7, {"about": 3, "why": "too many"})
    message = wire.decode_message([memoryview(header)], frozenset({"reject"}))
    assert (message.message_id, message.fields) == (7, {"about": 3, "why": "too many"})
