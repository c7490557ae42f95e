"""Access to local files and s3:// addresses. Only this module opens remote storage and reads its credentials."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from wfm_ds.errors import DataError, StorageError, escape_controls

NUM_TRIES = 8  # per request; the waits in between grow, about a minute in total
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60  # maximum time without receiving data
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PAGES = ("models", "datasets", "spaces")  # not owners of repositories, so `models/x` is a local folder
MAX_SHOWN_CHARS = 200  # of a path in messages
ACCESS_KEY = "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"
SECRET_KEY = "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"
ENDPOINT = "PROD_S3_CHECKPOINT_ENDPOINT_URL"
REGION = "PROD_S3_CHECKPOINT_REGION_NAME"
RANGE_PATTERN = re.compile(r"\{(\d+)\.\.(\d+)\}")
LFS_SIGN = b"version https://git-lfs.github.com/spec/"  # a file that Git LFS has not downloaded starts with this
LFS_ADVICE = "a Git LFS pointer, not the file itself: run git lfs pull"

BUFFER_BYTES = 256 * 1024  # per request; enough for the headers of most images


def existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def is_remote(address: str) -> bool:
    return "://" in address


def is_repo_id(path: str) -> bool:
    """Return whether `path` is a Hub repository owner/name and not a local file or folder."""
    return REPO_ID.fullmatch(path) is not None and path.partition("/")[0] not in HUB_PAGES and not os.path.exists(path)


def shorten_path(path: str | os.PathLike[str]) -> str:
    """Return a path or name for messages. The middle of long text is omitted, and control characters are escaped."""
    text = escape_controls(os.fspath(path)).replace("\n", "\\n")
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[: MAX_SHOWN_CHARS // 2]}...{text[-MAX_SHOWN_CHARS // 4 :]} ({len(text):,} characters)"


def shorten_error(error: BaseException) -> str:
    return shorten_path(" ".join(str(error).split()))


def open_filesystem(address: str, num_tries: int | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a path or `s3://` address, and the path within this file system.

    The S3 settings come from the environment variables PROD_S3_CHECKPOINT_*. If they are not set, they come from the
    default AWS configuration. Requests are tried up to `num_tries` times (default: NUM_TRIES). Raises StorageError for
    other schemes, an address without a bucket, an access key without a secret key, and if s3fs is not installed.
    """
    num_tries = num_tries or NUM_TRIES
    scheme, separator, rest = address.partition("://")
    if not separator:
        return fsspec.filesystem("file"), os.path.abspath(Path(address).expanduser())
    if scheme != "s3":
        raise StorageError(f"{address}: {scheme}:// is not supported; use a path or an s3:// address")
    if not rest.partition("/")[0]:
        raise StorageError(f"{address} names no bucket; use s3://BUCKET/PATH")
    try:
        fs = fsspec.filesystem("s3", **s3_options(os.environ, num_tries))
    except ImportError as error:
        raise StorageError(f"{address}: s3fs is not installed; run `pip install wfm_ds[s3]`") from error
    fs.retries = num_tries
    return fs, rest


def s3_options(environment: Mapping[str, str], num_tries: int) -> dict[str, Any]:
    """Return the options for s3fs. Raises StorageError if only one of access key and secret key is set."""
    key, secret = environment.get(ACCESS_KEY), environment.get(SECRET_KEY)
    if bool(key) != bool(secret):
        present, missing = (ACCESS_KEY, SECRET_KEY) if key else (SECRET_KEY, ACCESS_KEY)
        raise StorageError(f"{present} is set but {missing} is not: set both, or neither to use AWS's own credentials")
    client = {"endpoint_url": environment.get(ENDPOINT), "region_name": environment.get(REGION)}
    config = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"mode": "standard", "total_max_attempts": num_tries},
    }
    return {
        "key": key or None,
        "secret": secret or None,
        "client_kwargs": {name: value for name, value in client.items() if value},
        "config_kwargs": config,
    }


@contextlib.contextmanager
def convert_storage_errors(address: str, action: str = "read") -> Iterator[None]:
    """Convert I/O errors except FileNotFoundError to StorageError. action: `read` or `written`, for the message."""
    try:
        yield
    except FileNotFoundError:
        raise
    except storage_errors(is_remote(address)) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StorageError(f"{address} cannot be {action}: {reason[:300]}") from error


@cache
def storage_errors(remote: bool) -> tuple[type[Exception], ...]:
    if not remote:
        return (OSError,)
    from aiohttp import ClientError as BrokenConnection  # dependencies of s3fs
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, TimeoutError, BotoCoreError, ClientError, BrokenConnection)


def read_range(address: str, offset: int, size: int) -> bytes:
    """Read `size` bytes at byte `offset` of a local or S3 file.

    Raises FileNotFoundError, and StorageError if the file cannot be read or is too short.
    """
    fs, path = open_filesystem(address)
    with convert_storage_errors(address):
        content: bytes = fs.cat_file(path, start=offset, end=offset + size)
    if len(content) != size:
        raise StorageError(f"{address}: read {len(content)} instead of {size} bytes at {offset}: the file has changed")
    return content


def file_version(address: str) -> tuple[str | int, ...]:
    """Return (address, size, ETag or modification time), which changes when the file changes.

    Raises FileNotFoundError. Raises StorageError for pipes and devices, and if the access fails.
    """
    fs, path = open_filesystem(address)
    if not is_remote(address) and os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{address} is not a regular file")
    with convert_storage_errors(address):
        info = fs.info(path)
    return address if is_remote(address) else path, info["size"], str(info.get("ETag") or info.get("mtime"))


def expand_pattern(pattern: str) -> list[str]:
    """Expand a path or s3:// address with {000..123} or * ? [ ]. Local paths become absolute.

    Files of a range {000..123} need not exist. Matches of a glob are sorted. Raises DataError if a glob matches no
    file, and StorageError for a descending range.
    """
    return [address for part in expand_ranges(pattern) for address in expand_glob(part)]


def expand_ranges(pattern: str) -> list[str]:
    match = RANGE_PATTERN.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise StorageError(f"{pattern}: the range {match[0]} is descending")
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [part for n in numbers for part in expand_ranges(pattern[: match.start()] + n + pattern[match.end() :])]


def expand_glob(pattern: str) -> list[str]:
    if is_remote(pattern) and not glob.has_magic(pattern):
        return [pattern]
    fs, path = open_filesystem(pattern)
    if not glob.has_magic(pattern):
        return [path]
    with convert_storage_errors(pattern):
        names = sorted(fs.glob(path))
    if not names:
        raise DataError(f"{pattern}: no matching files")
    return [f"s3://{name}" if is_remote(pattern) else name for name in names]


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for pipes, sockets, devices and folders."""
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
    with open_regular(path) as file:
        return file.read()


class StorageStream(io.RawIOBase):
    """Unbuffered stream of a path or s3:// address. Opening and reading raise FileNotFoundError and StorageError."""

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

    def readall(self) -> bytes:
        """Read the rest of the file at once. The method of the base class makes a request for every 8 KiB."""
        count = max(0, self._size - self._position)
        content = read_range(self._address, self._position, count) if count else b""
        self._position += count
        return content


def open_stream(address: str) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(StorageStream(address), BUFFER_BYTES))
