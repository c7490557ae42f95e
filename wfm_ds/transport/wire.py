"""The wire format: converts between bytes and validated messages. Uses no sockets, no clock and no state.

A message is `[header][frame]*`. The header is a 4-byte checksum followed by a msgpack map. The frames are the tensors
as raw little-endian bytes in C order, at most MAX_FRAME_BYTES each. Everything is validated before memory is allocated.
There are no pickles and no class names. messages.py defines the message types and their keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from wfm_ds.transport.messages import SCHEMAS, TYPES_WITH_TENSORS, find_problem

RESERVED_KEYS = frozenset({"v", "t", "mid", "tensors"})  # header keys that messages cannot use
PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 64 * 1024
MAX_FRAME_BYTES = 4 * 2**20  # larger buffers cause page faults at each use; smaller ones need more messages
COPY_BLOCK_BYTES = 256 * 1024  # copied, then hashed while still in the CPU cache
CHECKSUM_MASK = 2**32 - 1
TABLE_REASON = "tensor table"
MAX_FRAMES = 320
MAX_PAYLOAD_BYTES = 2**30
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_DEPTH = 16  # the msgpack decoder allows hundreds of levels
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int32", "int64", "float16", "float32")}

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = bytes | memoryview


class WireError(ValueError):
    """Invalid or unexpected message. The receiver drops the message and counts the error."""

    def __init__(self, text: str, reason: str = "") -> None:
        """Create the error.

        reason: fixed text for this kind of error, used to limit log lines. Required if `text` contains data from the
        peer.
        """
        super().__init__(text)
        self.reason = reason or text


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One entry of a header's tensor table.

    It is enough to validate, slice and forward the frames without decoding them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int  # `compute_checksum` of the bytes; verified by the reader, not by the broker

    @property
    def num_frames(self) -> int:
        return -(-self.nbytes // MAX_FRAME_BYTES)


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message with a valid header and valid frame sizes. `payload` contains the received buffers."""

    type: str
    message_id: int
    fields: Mapping[str, Any]
    specs: tuple[TensorSpec, ...] = ()
    payload: tuple[Buffer, ...] = ()

    def read_tensors(self) -> list[Array]:
        """Return copies of the tensors in table order. The copies are aligned and writable.

        Raises WireError if a checksum is wrong.
        """
        arrays, start = [], 0
        for spec in self.specs:
            stop = start + spec.num_frames
            arrays.append(_join_frames(spec, self.payload[start:stop]))
            start = stop
        return arrays


def compute_checksum(data: Buffer) -> int:
    """Return the lower 32 bits of XXH3-64: as reliable as crc32 and ten times faster."""
    return xxhash.xxh3_64_intdigest(data) & CHECKSUM_MASK


def pack_tensors(arrays: Sequence[tuple[str, Array]]) -> tuple[list[TensorSpec], list[list[Buffer]]]:
    """Return the tensor table, and the frames of each tensor as views of its array.

    Do not modify the arrays until the frames are sent. Raises WireError for an unsupported dtype.
    """
    specs: list[TensorSpec] = []
    frames: list[list[Buffer]] = []
    for name, array in arrays:
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise WireError(f"{name}: unsupported dtype {dtype}; use {', '.join(DTYPES)}")
        flat = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8).data
        specs.append(TensorSpec(name, dtype, tuple(array.shape), flat.nbytes, compute_checksum(flat)))
        frames.append([flat[at : at + MAX_FRAME_BYTES] for at in range(0, flat.nbytes, MAX_FRAME_BYTES)])
    return specs, frames


def encode_header(
    message_type: str, message_id: int, fields: Mapping[str, Any], specs: Sequence[TensorSpec] = ()
) -> bytes:
    """Return the header frame. Raises WireError for messages that `decode_message` would reject."""
    assert not fields.keys() & RESERVED_KEYS, f"{message_type} uses a reserved header key"
    header: dict[str, Any] = {"v": PROTOCOL_VERSION, "t": message_type, "mid": message_id, **fields}
    if specs:
        header["tensors"] = [[s.name, s.dtype, list(s.shape), s.nbytes, s.checksum] for s in specs]
    _check_values(header)
    _check_fields(message_type, fields)
    _check_table(message_type, specs)
    try:
        packed: bytes = msgpack.packb(header)
    except ValueError as error:  # e.g. an unpaired surrogate in a prompt
        raise WireError(f"{message_type}: {error}") from error
    if len(packed) + 4 > MAX_HEADER_BYTES:
        raise WireError(f"{message_type}: header of {len(packed)} bytes, limit {MAX_HEADER_BYTES - 4}")
    return struct.pack("<I", compute_checksum(packed)) + packed


def decode_message(frames: Sequence[Buffer], expected: frozenset[str]) -> Message:
    """Decode a multipart message.

    Raises WireError, and no other exception, if it is invalid or not of an `expected` type.
    """
    if not 1 <= len(frames) <= 1 + MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, expected 1 to {1 + MAX_FRAMES}", "number of frames")
    header = _unpack_header(frames[0])
    if header.pop("v", None) != PROTOCOL_VERSION:
        raise WireError(f"not a message of protocol {PROTOCOL_VERSION}")
    message_type, mid = header.pop("t", None), header.pop("mid", None)
    if not isinstance(message_type, str) or message_type not in expected:
        raise WireError(f"message type {str(message_type)[:40]!r} is not expected here", "unexpected message type")
    if type(mid) is not int or mid < 0:
        raise WireError(f"{message_type}: mid is not an integer >= 0")
    specs = tuple(_parse_spec(entry) for entry in _parse_tensor_table(header.pop("tensors", [])))
    _check_fields(message_type, header)
    _check_table(message_type, specs)
    _check_payload(message_type, specs, frames[1:])
    return Message(message_type, mid, header, specs, tuple(frames[1:]))


def msgpack_size(value: Any) -> int:
    """Return the encoded size of a value in bytes. Raises WireError if a header cannot contain the value."""
    _check_values(value)
    try:
        return len(msgpack.packb(value))
    except ValueError as error:  # e.g. an unpaired surrogate
        raise WireError(f"not a plain value: {error}") from error


def _unpack_header(frame: Buffer) -> dict[str, Any]:
    blob = bytes(frame[: MAX_HEADER_BYTES + 1])
    if not 4 < len(blob) <= MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frame)} bytes, expected 5 to {MAX_HEADER_BYTES}", "header size")
    if struct.unpack_from("<I", blob)[0] != compute_checksum(blob[4:]):
        raise WireError("wrong header checksum")
    try:
        header = msgpack.unpackb(blob[4:], strict_map_key=True, max_ext_len=0, max_bin_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"the header is not msgpack: {type(error).__name__} {error}", "no msgpack") from error
    if not isinstance(header, dict):
        raise WireError("the header is not a map")
    _check_values(header)
    return header


def _check_values(value: Any, depth: int = 0) -> None:
    """Raise WireError unless all values are plain, finite and not nested too deeply.

    The decoder alone accepts NaN, byte keys and deep nesting.
    """
    if depth > MAX_DEPTH:
        raise WireError(f"nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (bool, str):
        return
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise WireError("integer beyond 64 bits")
    elif type(value) is float:
        if not math.isfinite(value):
            raise WireError("non-finite number")
    elif type(value) in (list, tuple):
        for item in value:
            _check_values(item, depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise WireError("map key is not a string")
            _check_values(item, depth + 1)
    else:
        raise WireError(f"unsupported value of type {type(value).__name__}")


def _check_fields(message_type: str, fields: Mapping[str, Any]) -> None:
    schema = SCHEMAS.get(message_type)
    if schema is None:
        raise WireError(f"{message_type[:40]!r} is not a message type")
    if fields.keys() != schema.keys():
        wrong = sorted(fields.keys() ^ schema.keys())
        raise WireError(f"{message_type}: missing or unknown keys: {', '.join(wrong)[:200]}", f"keys of {message_type}")
    for key, check in schema.items():
        problem = find_problem(fields[key], check)
        if problem:
            raise WireError(f"{message_type}.{key} {problem}", f"{message_type}.{key}")


def _parse_tensor_table(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise WireError(f"tensors is not a list of at most {MAX_TENSORS}")
    return value


def _parse_spec(entry: Any) -> TensorSpec:
    if not isinstance(entry, list) or len(entry) != 5:
        raise WireError("tensor table entry is not [name, dtype, shape, nbytes, checksum]")
    name, dtype, shape, nbytes, check = entry
    if not (isinstance(name, str) and len(name) <= 64 and isinstance(dtype, str) and isinstance(shape, list)):
        raise WireError("tensor table entry has wrong types")
    if not all(type(n) is int for n in (*shape, nbytes, check)):
        raise WireError("tensor table entry has non-integer sizes")
    return TensorSpec(name, dtype, tuple(shape), nbytes, check)


def _check_table(message_type: str, specs: Sequence[TensorSpec]) -> None:
    if specs and message_type not in TYPES_WITH_TENSORS:
        raise WireError(f"{message_type} cannot have tensors")
    if len(specs) > MAX_TENSORS:
        raise WireError(f"{message_type}: {len(specs)} tensors, limit {MAX_TENSORS}")
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise WireError(f"{message_type}: unsupported dtype {spec.dtype[:40]!r}", TABLE_REASON)
        if len(spec.shape) > MAX_DIMENSIONS or not all(0 <= n < 2**31 for n in spec.shape):
            raise WireError(f"{message_type}: invalid tensor shape {str(spec.shape)[:100]}", TABLE_REASON)
        if (
            math.prod(spec.shape) * DTYPES[spec.dtype].itemsize != spec.nbytes
            or not 0 <= spec.checksum <= CHECKSUM_MASK
        ):
            raise WireError(
                f"{message_type}: {spec.nbytes} bytes do not match {spec.dtype} {list(spec.shape)}", TABLE_REASON
            )
    if sum(s.nbytes for s in specs) > MAX_PAYLOAD_BYTES or sum(s.num_frames for s in specs) > MAX_FRAMES:
        raise WireError(f"{message_type}: more than {MAX_PAYLOAD_BYTES} bytes or {MAX_FRAMES} frames of tensors")


def _check_payload(message_type: str, specs: Sequence[TensorSpec], payload: Sequence[Buffer]) -> None:
    expected = [
        min(MAX_FRAME_BYTES, spec.nbytes - at) for spec in specs for at in range(0, spec.nbytes, MAX_FRAME_BYTES)
    ]  # at most MAX_FRAMES entries, as checked by _check_table
    sizes = [len(frame) for frame in payload]
    if sizes != expected:
        raise WireError(
            f"{message_type}: payload frames of {str(sizes)[:100]} bytes, expected {str(expected)[:100]}",
            "payload frame sizes",
        )


def _join_frames(spec: TensorSpec, frames: Sequence[Buffer]) -> Array:
    flat, digest, at = np.empty(spec.nbytes, dtype=np.uint8), xxhash.xxh3_64(), 0
    for frame in frames:
        source = np.frombuffer(frame, dtype=np.uint8)
        for start in range(0, len(source), COPY_BLOCK_BYTES):
            piece = source[start : start + COPY_BLOCK_BYTES]
            copied = flat[at : at + len(piece)]
            copied[:] = piece
            digest.update(copied.data)
            at += len(piece)
    if digest.intdigest() & CHECKSUM_MASK != spec.checksum:
        raise WireError(f"tensor {spec.name}: wrong checksum")
    return flat.view(DTYPES[spec.dtype]).reshape(spec.shape)
