"""Seekable streams over local or remote files that read only the requested ranges."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

from wfm_ds.storage.filesystem import file_version, read_range

BUFFER_BYTES = 256 * 1024  # per request; enough for the headers of most images


class StorageStream(io.RawIOBase):
    """Unbuffered stream over a path or s3:// address. Opening and reading raise FileNotFoundError and StorageError."""

    def __init__(self, address: str) -> None:
        self._address, self._position = address, 0
        self._size = int(file_version(address)[1])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._size - self._position))
        if count:
            buffer[:count] = read_range(self._address, self._position, count)
        self._position += count
        return count


def open_stream(address: str) -> BinaryIO:
    """Open a path or s3:// address for buffered reading. Raises FileNotFoundError and StorageError."""
    return cast(BinaryIO, io.BufferedReader(StorageStream(address), BUFFER_BYTES))
