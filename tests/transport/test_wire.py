"""Messages survive encoding and decoding; any other bytes raise a WireError and nothing else."""

import contextlib
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bad_frames import a_message
from wfm_ds.transport import wire
from wfm_ds.transport.messages import CLIENT_TO_BROKER, SCHEMAS, WORKER_TO_BROKER
from wfm_ds.transport.wire import MAX_FRAME_BYTES, MAX_HEADER_BYTES, WireError

ALL = frozenset(SCHEMAS)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary(max_size=9)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3) | st.integers(0, 9), inner),
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
    return [header, *frames]


@given(st.lists(st.dictionaries(st.text("abc", max_size=3), plain, max_size=3), max_size=3), st.lists(arrays))
@settings(max_examples=80, deadline=None)
def test_decoding_inverts_encoding(rows, tensors):
    message = wire.decode_message([bytes(frame) for frame in submit(rows, tensors)], ALL)
    assert (message.type, message.message_id, message.fields["rows"]) == ("submit", 7, rows)
    for got, want in zip(message.read_tensors(), tensors, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@given(st.integers(0, 2**32), st.sampled_from([CLIENT_TO_BROKER, WORKER_TO_BROKER]), st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_anything_else_is_a_wire_error(seed, types, junk):
    for frames in (a_message(random.Random(seed), types), [junk], [msgpack.packb(["since"]), junk]):
        with contextlib.suppress(WireError):
            message = wire.decode_message(frames, types)
            assert message.type in types
            assert sum(array.nbytes for array in message.read_tensors()) == sum(map(len, frames[1:]))


def test_errors_name_the_wrong_field():
    since = {"v": wire.PROTOCOL_VERSION, "t": "since", "mid": 1, "seq": 0}
    media = {**since, "t": "submit", "rows": [{}], "tasks": []}
    del media["seq"]
    huge, lying = ["m", "uint8", [2**31 - 1] * 8], ["m", "uint8", [5]]
    for header, frames, says in [
        (since | {"v": 1}, [], "not a message of protocol 2: use the same version"),
        (since | {"t": "welcome"}, [], "'welcome' is not expected here"),
        (since | {"mid": True}, [], "mid is not an integer"),
        (since | {"mid": 2**63}, [], "mid is not an integer"),
        (since | {"seq": "0"}, [], "since.seq: Input should be a valid integer"),
        (since | {"seq": -1}, [], "since.seq: Input should be greater than or equal to 0"),
        (since | {"more": 1}, [], "since.more: Extra inputs are not permitted"),
        (since | {"tensors": [["m", "uint8", [1]]]}, [b"a"], "since cannot have tensors"),
        (since, [b"surplus"], r"since: frames of \[7\] bytes, expected \[\]"),
        (media | {"tensors": [huge]}, [b"abcd"], "limits: 64, 1073741824, 320"),
        (media | {"tensors": [lying]}, [b"abcd"], r"frames of \[4\] bytes, expected \[5\]"),
        (media | {"tensors": [["m", "object", [4]]]}, [b"abcd"], "submit.tensors.0.1: String should match"),
        (media | {"rows": [{}] * 65}, [], "submit.rows: List should have at most 64 items"),
    ]:
        with pytest.raises(WireError, match=says):
            wire.decode_message([msgpack.packb(header), *frames], CLIENT_TO_BROKER)
    for frames, says in [
        ([], "0 frames"),
        ([b""] * 322, "322 frames"),
        ([b"x" * (MAX_HEADER_BYTES + 1)], "header of 65537 bytes"),
        ([msgpack.packb(since) + b"\x01"], "not msgpack"),
        ([msgpack.packb([1])], "not a map"),
    ]:
        with pytest.raises(WireError, match=says):
            wire.decode_message(frames, ALL)


def test_unsupported_values_are_errors_of_the_sender():
    for value in (2**64, object(), np.float32(1), "\ud800", "x" * 70000, np.zeros(2)):
        with pytest.raises(WireError, match=r"not a plain value|header of 7"):
            submit([{"value": value}], [])
    for tensors, says in [
        ([np.zeros(1, np.complex64)], "unsupported dtype complex64"),
        ([np.zeros(1, np.uint8)] * 65, "65 tensors"),
    ]:
        with pytest.raises(WireError, match=says):
            submit([{}], tensors)


def test_large_and_sliced_tensors_are_cut_into_frames_and_copied_aligned():
    big = np.arange(MAX_FRAME_BYTES // 2 + 3, dtype=np.int64)
    sliced = np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2]
    header, *frames = submit([{}], [big, sliced])
    assert [len(f) for f in frames] == [MAX_FRAME_BYTES] * 4 + [24, 12]
    shifted = [memoryview(b"x" + bytes(f))[1:] for f in frames]  # unaligned, like the buffers of zmq
    for got, want in zip(wire.decode_message([header, *shifted], ALL).read_tensors(), (big, sliced), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.flags.aligned
        assert got.flags.writeable


def test_no_message_uses_a_name_of_the_header():
    assert not any(schema.model_fields.keys() & wire.RESERVED_KEYS for schema in SCHEMAS.values())
