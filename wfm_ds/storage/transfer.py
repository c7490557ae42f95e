"""Whole files to S3 and back, verified. Which files, and when, is the business of others.

A file that was sent counts as there only when the storage reports its size and, as ETag, the MD5 of what was read
here; each request also carries an MD5 of its content, by which S3 itself refuses what changed on the way. Under KMS
encryption an ETag is no MD5, and that refusal is the check.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from wfm_ds.errors import StorageError
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import answering, filesystem, read_range

PART_BYTES = 32 << 20  # of one request; as many as NUM_CONNECTIONS are in memory
MAX_PARTS = 10_000  # of a file, S3's limit
NUM_CONNECTIONS = 4
PAGE_KEYS = 1000  # of one answer of a listing, S3's limit
NUM_TRIES = 3  # of one request: whoever sends tries again later, and should hear soon that something is wrong
MD5_TAG = re.compile(r'"?([0-9a-f]{32}(-[0-9]+)?)"?')
Item = TypeVar("Item")
Result = TypeVar("Result")
Moved = Callable[[int], None]
"""Called with the number of bytes of each part that has arrived. What it raises ends the transfer."""


def ignore(num_bytes: int) -> None:
    pass


def upload(path: Path, address: str, *, size: int | None = None, moved: Moved = ignore) -> str:
    """Copy the file, or its first `size` bytes, to an s3:// address, and return the SHA-256 of these bytes.

    An object of that name is replaced at once, when all has arrived. Raises OSError if the file cannot be read,
    StorageError if the storage fails, refuses, or reports something else than was sent.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        parts = _parts(path, file, size, part_bytes)
        target = _Target(address)
        if size <= part_bytes:
            content = next(parts)
            sha256.update(content)
            tag = target.put(content)
            moved(size)
        else:
            tag = target.put_parts(_hashed(parts, sha256.update), moved)
    target.require(size, tag)
    return sha256.hexdigest()


def put(content: bytes, address: str) -> None:
    """Make this the content of an s3:// address. Raises StorageError."""
    target = _Target(address)
    target.require(len(content), target.put(content))


def copy_within(source: str, address: str, size: int) -> None:
    """Let the storage itself copy an object of this size. Raises StorageError."""
    target = _Target(address)
    with _writing(address):
        target.fs.cp_file(_Target(source).path, target.path)
    target.require(size, None)


def download(address: str, path: Path, *, size: int, sha256: str | None = None, moved: Moved = ignore) -> None:
    """Copy an object to a file, which is complete or absent. Raises OSError if the file cannot be written, StorageError
    if the storage fails, FileNotFoundError included, or if it has other bytes than these."""
    digest = hashlib.sha256()
    offsets = range(0, size, PART_BYTES)
    with atomic.new_file(path) as part, part.open("wb") as file:
        for content in _ahead(lambda offset: _range(address, offset, min(PART_BYTES, size - offset)), offsets):
            digest.update(content)
            file.write(content)
            moved(len(content))
    if sha256 is not None and digest.hexdigest() != sha256:
        path.unlink()
        raise StorageError(f"{address} is damaged: its SHA-256 is not the one that was noted when it was written")


def listing(address: str) -> dict[str, int]:
    """Return {name below the address: size} of all objects there. Raises StorageError."""
    target = _Target(address)
    found: dict[str, int] = {}
    page: dict[str, Any] = {}
    prefix = f"{target.key}/" if target.key else ""
    while True:
        with answering(address), _no_bucket(address):
            page = target.call("list_objects_v2", key=False, Prefix=prefix, MaxKeys=PAGE_KEYS, **page)
        found |= {entry["Key"].removeprefix(prefix): int(entry["Size"]) for entry in page.get("Contents", [])}
        if not page.get("IsTruncated"):
            return {name: size for name, size in found.items() if name and not name.endswith("/")}
        page = {"ContinuationToken": page["NextContinuationToken"]}


def read_text(address: str) -> str:
    """Read the UTF-8 text of an object. Raises FileNotFoundError and StorageError."""
    target = _Target(address)
    with answering(address):
        content: bytes = target.fs.cat_file(target.path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"{address} is not a text in UTF-8") from error


def remove(addresses: Iterable[str]) -> None:
    """Remove objects, in this order; those that do not exist are no error. Raises StorageError."""
    for address in addresses:
        target = _Target(address)
        with _writing(address):
            target.call("delete_object")


def require_writable(address: str) -> None:
    """Write an object below the address, read it back, and remove it. Raises StorageError."""
    probe, content = f"{address}/.wfm_ds-{secrets.token_hex(8)}", b"may be removed\n"
    put(content, probe)
    if _range(probe, 0, len(content)) != content:
        raise StorageError(f"{probe} holds something else than what was written there a moment ago")
    remove([probe])


@contextlib.contextmanager
def _writing(address: str) -> Iterator[None]:
    with _no_bucket(address), answering(address, "written"):
        yield


@contextlib.contextmanager
def _no_bucket(address: str) -> Iterator[None]:
    """Turn FileNotFoundError of the block into StorageError: only a missing bucket can be the reason."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{address}: there is no such bucket, or an upload to it was cancelled") from error


def _range(address: str, offset: int, size: int) -> bytes:
    try:
        return read_range(address, offset, size)
    except FileNotFoundError as error:
        raise StorageError(f"{address} does not exist") from error


class _Target:
    """An object in S3, and the requests about it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.fs, self.path = filesystem(address, NUM_TRIES)
        self.bucket, _, self.key = self.path.partition("/")

    def call(self, method: str, *, key: bool = True, **arguments: Any) -> dict[str, Any]:
        where = {"Bucket": self.bucket, **({"Key": self.key} if key else {})}
        answer: dict[str, Any] = self.fs.call_s3(method, **where, **arguments)
        return answer

    def put(self, content: bytes) -> str:
        """Send the object; return the MD5 of what was sent, as in an ETag."""
        md5 = hashlib.md5(content, usedforsecurity=False)
        with _writing(self.address):
            self.call("put_object", Body=content, ContentMD5=_in_base64(md5.digest()))
        return md5.hexdigest()

    def put_parts(self, parts: Iterable[bytes], moved: Moved) -> str:
        """Send the parts; return the MD5 of the MD5s of all parts and their number, as in an ETag."""
        with _writing(self.address):
            upload_id = self.call("create_multipart_upload")["UploadId"]
        try:
            sent = []
            for number, (tag, md5, num_bytes) in enumerate(
                _ahead(lambda numbered: self._put_part(upload_id, *numbered), enumerate(parts, 1)), 1
            ):
                sent.append((number, tag, md5))
                moved(num_bytes)
            listed = [{"PartNumber": number, "ETag": tag} for number, tag, _ in sent]
            with _writing(self.address):
                self.call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": listed})
        except BaseException:
            with contextlib.suppress(StorageError), _writing(self.address):  # else its parts are stored, and paid for
                self.call("abort_multipart_upload", UploadId=upload_id)
            raise
        whole = hashlib.md5(b"".join(md5 for _, _, md5 in sent), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(sent)}"

    def _put_part(self, upload_id: str, number: int, content: bytes) -> tuple[str, bytes, int]:
        md5 = hashlib.md5(content, usedforsecurity=False).digest()
        with _writing(self.address):
            answer = self.call(
                "upload_part", UploadId=upload_id, PartNumber=number, Body=content, ContentMD5=_in_base64(md5)
            )
        return answer["ETag"], md5, len(content)

    def require(self, size: int, tag: str | None) -> None:
        """Raise StorageError unless the storage reports the object as it was sent."""
        with _writing(self.address):
            answer = self.call("head_object")
        if int(answer["ContentLength"]) != size:
            raise StorageError(f"{self.address} has {answer['ContentLength']} instead of {size} bytes after its upload")
        found = MD5_TAG.fullmatch(answer.get("ETag", ""))
        encrypted = "kms" in answer.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in answer
        if tag is not None and found is not None and not encrypted and found[1] != tag:
            raise StorageError(f"{self.address} was damaged on its way: the storage has another MD5 than was sent")


def _in_base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _parts(path: Path, file: IO[bytes], size: int, part_bytes: int) -> Iterator[bytes]:
    """Yield the first `size` bytes; at least one part, which is empty for none."""
    left = size
    while True:
        content = file.read(min(part_bytes, left))
        if len(content) != min(part_bytes, left):
            raise OSError(f"{path} became shorter while it was read")
        yield content
        left -= len(content)
        if left == 0:
            return


def _hashed(parts: Iterable[bytes], update: Callable[[bytes], None]) -> Iterator[bytes]:
    for part in parts:
        update(part)
        yield part


def _ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map` with NUM_CONNECTIONS threads, which takes no more items than these work on."""
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="storage") as pool:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) == NUM_CONNECTIONS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
