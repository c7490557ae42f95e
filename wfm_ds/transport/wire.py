"""The wire format: converts between bytes and messages.

A message is `[header][frame]*`. The header is a msgpack map. The frames are the tensors as raw little-endian bytes in C
order, at most MAX_FRAME_BYTES each. There is no checksum, because TCP and CURVE detect damaged bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from wfm_ds.transport.messages import SCHEMAS, TYPES_WITH_TENSORS

RESERVED_KEYS = frozenset({"v", "t", "mid", "tensors"})  # header keys that messages cannot use
PROTOCOL_VERSION = 2
MAX_HEADER_BYTES = 64 * 1024
MAX_FRAME_BYTES = 4 * 2**20  # larger buffers cause page faults at each use; smaller ones need more messages
MAX_FRAMES = 320
MAX_PAYLOAD_BYTES = 2**30
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_REASON_CHARS = 200
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "int32", "int64", "float16", "float32")}

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = bytes | memoryview
T = TypeVar("T")


class WireError(ValueError):
    """Raised if a message cannot be sent, or if a received message is invalid or unexpected."""


class TensorSpec(NamedTuple):
    """One entry of a header's tensor table."""

    name: Annotated[str, Field(strict=True, max_length=64)]
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...], Field(max_length=MAX_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def num_frames(self) -> int:
        return -(-self.nbytes // MAX_FRAME_BYTES)


_TENSOR_TABLE = TypeAdapter(Annotated[tuple[TensorSpec, ...], Field(max_length=MAX_TENSORS)])


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message with a valid header and valid frame sizes. `payload` contains the received buffers."""

    type: str
    message_id: int
    fields: Mapping[str, Any]
    specs: tuple[TensorSpec, ...] = ()
    payload: tuple[Buffer, ...] = ()

    def read_tensors(self) -> list[Array]:
        """Return aligned, writable copies of the tensors in table order."""
        arrays, start = [], 0
        for spec in self.specs:
            flat = np.empty(spec.nbytes, dtype=np.uint8)
            for number, frame in enumerate(self.payload[start : start + spec.num_frames]):
                flat[number * MAX_FRAME_BYTES :][: len(frame)] = np.frombuffer(frame, dtype=np.uint8)
            arrays.append(flat.view(DTYPES[spec.dtype]).reshape(spec.shape))
            start += spec.num_frames
        return arrays


def pack_tensors(arrays: Sequence[tuple[str, Array]]) -> tuple[list[TensorSpec], list[Buffer]]:
    """Return the tensor table and the frames of the tensors.

    Frames are views of the tensors, so do not modify the tensors until the frames are sent. Raises WireError for an
    unsupported dtype or too much data.
    """
    specs: list[TensorSpec] = []
    frames: list[Buffer] = []
    num_bytes = 0
    for name, array in arrays:
        dtype = array.dtype.name
        if dtype not in DTYPES:
            raise WireError(f"{name}: unsupported dtype {dtype}; use {', '.join(DTYPES)}")
        flat = np.ascontiguousarray(array, dtype=DTYPES[dtype]).reshape(-1).view(np.uint8).data
        specs.append(TensorSpec(name, dtype, tuple(array.shape)))
        frames += [flat[at : at + MAX_FRAME_BYTES] for at in range(0, flat.nbytes, MAX_FRAME_BYTES)]
        num_bytes += flat.nbytes
    _check_limits(len(specs), num_bytes, len(frames))
    return specs, frames


def encode_header(
    message_type: str, message_id: int, fields: Mapping[str, Any], specs: Sequence[TensorSpec] = ()
) -> bytes:
    """Return a message's header, without checking it against the schema. Raises WireError if it cannot be encoded."""
    assert not fields.keys() & RESERVED_KEYS, f"{message_type} uses a reserved header key"
    header = {"v": PROTOCOL_VERSION, "t": message_type, "mid": message_id, **fields}
    packed = pack_value(header | {"tensors": list(specs)} if specs else header)
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"{message_type}: header of {len(packed)} bytes, limit {MAX_HEADER_BYTES}")
    return packed


def pack_value(value: Any) -> bytes:
    """Encode a plain value with msgpack. Raises WireError if it cannot be encoded."""
    try:
        packed: bytes = msgpack.packb(value)
    except (ValueError, TypeError, OverflowError) as error:  # e.g. a tensor, or an unpaired surrogate in a prompt
        raise WireError(f"not a plain value: {error}") from error
    return packed


def decode_message(frames: Sequence[Buffer], expected: frozenset[str]) -> Message:
    """Decode a multipart message. Raises only WireError: if it is invalid or its type is not in `expected`."""
    if not 1 <= len(frames) <= 1 + MAX_FRAMES:
        raise WireError(f"{len(frames)} frames, expected 1 to {1 + MAX_FRAMES}")
    header = _unpack_header(frames[0])
    if header.pop("v", None) != PROTOCOL_VERSION:
        raise WireError(f"not a message of protocol {PROTOCOL_VERSION}: use the same version of wfm_ds everywhere")
    message_type, mid = header.pop("t", None), header.pop("mid", None)
    if not isinstance(message_type, str) or message_type not in expected:
        raise WireError(f"message type {str(message_type)[:40]!r} is not expected here")
    if type(mid) is not int or not 0 <= mid < 2**63:
        raise WireError(f"{message_type}: mid is not an integer from 0 to 2**63 - 1")
    table = header.pop("tensors", [])
    _validate(SCHEMAS[message_type].model_validate, header, message_type)
    specs = _validate(_TENSOR_TABLE.validate_python, table, f"{message_type}.tensors")
    if specs and message_type not in TYPES_WITH_TENSORS:
        raise WireError(f"{message_type} cannot have tensors")
    tensor_sizes = [spec.nbytes for spec in specs]
    # Check this before the list of frame sizes is built, because an invalid shape could make the list huge.
    _check_limits(len(specs), sum(tensor_sizes), sum(spec.num_frames for spec in specs))
    expected_sizes = [min(MAX_FRAME_BYTES, n - at) for n in tensor_sizes for at in range(0, n, MAX_FRAME_BYTES)]
    sizes = [len(frame) for frame in frames[1:]]
    if sizes != expected_sizes:
        raise WireError(f"{message_type}: frames of {str(sizes)[:100]} bytes, expected {str(expected_sizes)[:100]}")
    return Message(message_type, mid, header, specs, tuple(frames[1:]))


def _unpack_header(frame: Buffer) -> dict[Any, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frame)} bytes, limit {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"the header is not msgpack: {type(error).__name__} {error}"[:MAX_REASON_CHARS]) from error
    if not isinstance(header, dict):
        raise WireError("the header is not a map")
    return header


def _validate(validate: Callable[[Any], T], value: Any, place: str) -> T:
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, (place, *first["loc"])))
        raise WireError(f"{place[:MAX_REASON_CHARS]}: {first['msg'][:MAX_REASON_CHARS]}") from error


def _check_limits(num_tensors: int, num_bytes: int, num_frames: int) -> None:
    if num_tensors > MAX_TENSORS or num_bytes > MAX_PAYLOAD_BYTES or num_frames > MAX_FRAMES:
        raise WireError(
            f"{num_tensors} tensors of {num_bytes} bytes in {num_frames} frames; limits: {MAX_TENSORS}, "
            f"{MAX_PAYLOAD_BYTES}, {MAX_FRAMES}"
        )
