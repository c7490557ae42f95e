"""Files by address, on this machine or in S3: the one place that opens remote storage and knows its credentials."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fsspec

from wfm_ds.errors import DataError, StorageError

NUM_TRIES = 8  # of one request; the waits between them grow, to about a minute in all
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60  # without a byte
NUM_SHOWN = 200  # characters of a path
ACCESS_KEY = "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"
SECRET_KEY = "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY"
ENDPOINT = "PROD_S3_CHECKPOINT_ENDPOINT_URL"
REGION = "PROD_S3_CHECKPOINT_REGION_NAME"
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_remote(address: str) -> bool:
    return "://" in address


def shortened(path: str | os.PathLike[str]) -> str:
    """Return a path as a message can show it: the middle of a very long one is left out."""
    text = os.fspath(path)
    if len(text) <= NUM_SHOWN:
        return text
    return f"{text[: NUM_SHOWN // 2]}...{text[-NUM_SHOWN // 4 :]} ({len(text):,} characters)"


def filesystem(address: str, num_tries: int | None = None) -> tuple[Any, str]:
    """Return the fsspec file system of a path or `s3://` address, and the path within it.

    S3 is asked with the four PROD_S3_CHECKPOINT_ variables; those that are not set are found where AWS's own tools find
    them. Requests are tried NUM_TRIES times, or `num_tries`. StorageError for other kinds of address, for a key without
    its secret, and where s3fs is not installed.
    """
    num_tries = num_tries or NUM_TRIES
    scheme, found, rest = address.partition("://")
    if not found:
        return fsspec.filesystem("file"), os.path.abspath(Path(address).expanduser())
    if scheme != "s3":
        raise StorageError(f"{address}: {scheme}:// is not supported; use a path or an s3:// address")
    try:
        fs = fsspec.filesystem("s3", **s3_options(os.environ, num_tries))
    except ImportError as error:
        raise StorageError(f"{address}: s3fs is not installed; run `pip install wfm_ds[s3]`") from error
    fs.retries = num_tries
    return fs, rest


def s3_options(environment: Mapping[str, str], num_tries: int) -> dict[str, Any]:
    """Return the options of s3fs. StorageError, which names variables and no value, if a key lacks its secret."""
    key, secret = environment.get(ACCESS_KEY), environment.get(SECRET_KEY)
    if bool(key) != bool(secret):
        there, lacking = (ACCESS_KEY, SECRET_KEY) if key else (SECRET_KEY, ACCESS_KEY)
        raise StorageError(f"{there} is set and {lacking} is not: set both, or none to use AWS's own credentials")
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
def answering(address: str, action: str = "read") -> Iterator[None]:
    """Turn what a storage that fails or refuses raises in the block into StorageError. FileNotFoundError stays."""
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
    from aiohttp import ClientError as BrokenConnection  # only where s3fs is, which needs both
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, TimeoutError, BotoCoreError, ClientError, BrokenConnection)


def read_range(address: str, offset: int, size: int) -> bytes:
    """Read these bytes of a file. A connection that breaks is opened again, NUM_TRIES times at most.

    Raises FileNotFoundError, and StorageError when the storage keeps failing or the file is too short.
    """
    fs, path = filesystem(address)
    with answering(address):
        content: bytes = fs.cat_file(path, start=offset, end=offset + size)
    if len(content) != size:
        raise StorageError(f"{address} has {len(content)} instead of {size} bytes at {offset}: it has changed")
    return content


def version(address: str) -> tuple[str | int, ...]:
    """Return (address, size, tag), which changes when the file does. Raises FileNotFoundError and StorageError, the
    latter also for what is no regular file: a read of a pipe or a device may never end."""
    fs, path = filesystem(address)
    if not is_remote(address) and os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{address} is not a regular file")
    with answering(address):
        info = fs.info(path)
    return address if is_remote(address) else path, info["size"], str(info.get("ETag") or info.get("mtime"))


def expand(pattern: str) -> list[str]:
    """Return the addresses that a path or s3:// address with {000..123} and * ? [ ] stands for, sorted where it is a
    glob.

    Paths are made absolute. Those of a range need not exist. DataError for globs that match nothing, StorageError for
    ranges that run backwards.
    """
    return [address for one in expand_ranges(pattern) for address in expand_glob(one)]


def expand_ranges(pattern: str) -> list[str]:
    found = RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = found[1], found[2]
    if int(last) < int(first):
        raise StorageError(f"{pattern}: the range {found[0]} runs backwards")
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [one for n in numbers for one in expand_ranges(pattern[: found.start()] + n + pattern[found.end() :])]


def expand_glob(pattern: str) -> list[str]:
    if is_remote(pattern) and not glob.has_magic(pattern):
        return [pattern]
    fs, path = filesystem(pattern)
    if not glob.has_magic(pattern):
        return [path]
    with answering(pattern):
        found = sorted(fs.glob(path))
    if not found:
        raise DataError(f"{pattern}: no file has such a name")
    return [f"s3://{name}" if is_remote(pattern) else name for name in found]
