"""Open only regular files, so that a pipe or device in a user's folder cannot block the reader."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also if it is a pipe, a socket, a device or a folder."""
    # Without O_NONBLOCK, opening a pipe waits for a writer. The flag has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path | str) -> bytes:
    """Return the bytes of a regular file. Raises OSError like `open_regular`."""
    with open_regular(path) as file:
        return file.read()
