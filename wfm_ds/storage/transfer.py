"""Upload and download whole files to and from S3, with verification.

The size and the ETag (MD5) that S3 reports must match the uploaded data. Each request also contains a Content-MD5,
which is the only check with KMS encryption, because the ETag is then not an MD5.
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
from wfm_ds.storage.filesystem import convert_storage_errors, open_filesystem, read_range

PART_BYTES = 32 << 20  # per request; up to NUM_CONNECTIONS parts are in memory
MAX_PARTS = 10_000  # per file, limit of S3
NUM_CONNECTIONS = 4
KEYS_PER_PAGE = 1000  # per list request, limit of S3
NUM_TRIES = 3  # per request; low, because callers need errors early and retry later
MD5_TAG = re.compile(r'"?([0-9a-f]{32}(-[0-9]+)?)"?')
Item = TypeVar("Item")
Result = TypeVar("Result")
ProgressCallback = Callable[[int], None]
"""Function that receives the number of bytes of each transferred part. It may raise an error to abort the transfer."""


def ignore_progress(num_bytes: int) -> None:
    pass


def upload_file(
    path: Path, address: str, *, size: int | None = None, on_progress: ProgressCallback = ignore_progress
) -> str:
    """Upload a file, or its first `size` bytes, to an s3:// address. Return the SHA-256 of the uploaded bytes.

    Raises OSError if the file cannot be read. Raises StorageError if the upload fails or S3 reports a different size or
    MD5. An existing object stays unchanged until the upload is complete.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size if size is None else size
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        parts = _read_parts(path, file, size, part_bytes, sha256.update)
        target = _S3Object(address)
        if size <= part_bytes:
            tag = target.put(next(parts))
            on_progress(size)
        else:
            tag = target.put_parts(parts, on_progress)
    target.verify_upload(size, tag)
    return sha256.hexdigest()


def put_object(content: bytes, address: str) -> None:
    """Write `content` to an s3:// address and verify the object. Raises StorageError."""
    target = _S3Object(address)
    target.verify_upload(len(content), target.put(content))


def copy_object(source: str, address: str, size: int) -> None:
    target = _S3Object(address)
    with _convert_write_errors(address):
        target.fs.cp_file(_S3Object(source).path, target.path)
    target.verify_upload(size, None)


def download_file(address: str, path: Path, *, size: int, sha256: str | None = None) -> None:
    """Download an S3 object to a file, atomically. Raises OSError if the file cannot be written.

    Raises StorageError if the object is missing or cannot be read, or if its size or SHA-256 does not match.
    """
    digest = hashlib.sha256()
    offsets = range(0, size, PART_BYTES)
    with atomic.new_file(path) as part, part.open("wb") as file:
        for content in _map_concurrently(
            lambda offset: _read_range(address, offset, min(PART_BYTES, size - offset)), offsets
        ):
            digest.update(content)
            file.write(content)
    if sha256 is not None and digest.hexdigest() != sha256:
        path.unlink()
        raise StorageError(f"{address} is damaged: its SHA-256 differs from the one recorded at its upload")


def list_objects(address: str) -> dict[str, int]:
    """Return {name relative to `address`: size in bytes} of all S3 objects below `address`. Raises StorageError."""
    target = _S3Object(address)
    sizes: dict[str, int] = {}
    page: dict[str, Any] = {}
    prefix = f"{target.key}/" if target.key else ""
    while True:
        with convert_storage_errors(address), _convert_missing_bucket(address):
            page = target.call("list_objects_v2", key=False, Prefix=prefix, MaxKeys=KEYS_PER_PAGE, **page)
        sizes |= {entry["Key"].removeprefix(prefix): int(entry["Size"]) for entry in page.get("Contents", [])}
        if not page.get("IsTruncated"):
            return {name: size for name, size in sizes.items() if name and not name.endswith("/")}
        page = {"ContinuationToken": page["NextContinuationToken"]}


def read_text(address: str) -> str:
    target = _S3Object(address)
    with convert_storage_errors(address):
        content: bytes = target.fs.cat_file(target.path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"{address} is not UTF-8 text") from error


def remove_objects(addresses: Iterable[str]) -> None:
    """Remove S3 objects in the given order. Missing objects are ignored. Raises StorageError."""
    for address in addresses:
        target = _S3Object(address)
        with _convert_write_errors(address):
            target.call("delete_object")


def require_writable(address: str) -> None:
    """Write, read and remove a small S3 object below `address`. Raises StorageError if this fails."""
    probe, content = f"{address}/.wfm_ds-{secrets.token_hex(8)}", b"may be removed\n"
    put_object(content, probe)
    if _read_range(probe, 0, len(content)) != content:
        raise StorageError(f"{probe}: read back other data than was written")
    remove_objects([probe])


@contextlib.contextmanager
def _convert_write_errors(address: str) -> Iterator[None]:
    with _convert_missing_bucket(address), convert_storage_errors(address, "written"):
        yield


@contextlib.contextmanager
def _convert_missing_bucket(address: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{address}: the bucket does not exist, or an upload to it was cancelled") from error


def _read_range(address: str, offset: int, size: int) -> bytes:
    try:
        return read_range(address, offset, size)
    except FileNotFoundError as error:
        raise StorageError(f"{address} does not exist") from error


class _S3Object:
    """An S3 object to upload and verify."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.fs, self.path = open_filesystem(address, NUM_TRIES)
        self.bucket, _, self.key = self.path.partition("/")

    def call(self, method: str, *, key: bool = True, **arguments: Any) -> dict[str, Any]:
        location = {"Bucket": self.bucket, **({"Key": self.key} if key else {})}
        response: dict[str, Any] = self.fs.call_s3(method, **location, **arguments)
        return response

    def put(self, content: bytes) -> str:
        """Upload the object in one request. Return the expected ETag: the MD5 of the content."""
        md5 = hashlib.md5(content, usedforsecurity=False)
        with _convert_write_errors(self.address):
            self.call("put_object", Body=content, ContentMD5=_base64_text(md5.digest()))
        return md5.hexdigest()

    def put_parts(self, parts: Iterable[bytes], on_progress: ProgressCallback) -> str:
        """Upload the object in parts. Return the expected ETag: the MD5 of the parts' MD5s, and the number of parts."""
        with _convert_write_errors(self.address):
            upload_id = self.call("create_multipart_upload")["UploadId"]
        try:
            sent = []
            for tag, md5, num_bytes in _map_concurrently(
                lambda numbered: self._put_part(upload_id, *numbered), enumerate(parts, 1)
            ):
                sent.append((tag, md5))
                on_progress(num_bytes)
            part_list = [{"PartNumber": number, "ETag": tag} for number, (tag, _) in enumerate(sent, 1)]
            with _convert_write_errors(self.address):
                self.call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": part_list})
        except BaseException:
            # Otherwise, the parts would remain stored and billed.
            with contextlib.suppress(StorageError), _convert_write_errors(self.address):
                self.call("abort_multipart_upload", UploadId=upload_id)
            raise
        whole = hashlib.md5(b"".join(md5 for _, md5 in sent), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(sent)}"

    def _put_part(self, upload_id: str, number: int, content: bytes) -> tuple[str, bytes, int]:
        md5 = hashlib.md5(content, usedforsecurity=False).digest()
        with _convert_write_errors(self.address):
            response = self.call(
                "upload_part", UploadId=upload_id, PartNumber=number, Body=content, ContentMD5=_base64_text(md5)
            )
        return response["ETag"], md5, len(content)

    def verify_upload(self, size: int, tag: str | None) -> None:
        """Raise StorageError unless S3 reports this size and ETag. An ETag that is not an MD5 is not compared."""
        with _convert_write_errors(self.address):
            response = self.call("head_object")
        if int(response["ContentLength"]) != size:
            raise StorageError(f"{self.address} has {response['ContentLength']} instead of {size} bytes after upload")
        match = MD5_TAG.fullmatch(response.get("ETag", ""))
        is_encrypted = "kms" in response.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in response
        if tag is not None and match is not None and not is_encrypted and match[1] != tag:
            raise StorageError(f"{self.address} was damaged in transit: the storage reports another MD5 than was sent")


def _base64_text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _read_parts(
    path: Path, file: IO[bytes], size: int, part_bytes: int, update_hash: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file in parts. If size is 0, yield one empty part."""
    remaining = size
    while True:
        content = file.read(min(part_bytes, remaining))
        if len(content) != min(part_bytes, remaining):
            raise OSError(f"{path} became shorter while it was read")
        update_hash(content)
        yield content
        remaining -= len(content)
        if remaining == 0:
            return


def _map_concurrently(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield work(item) in order, computed in threads. At most NUM_CONNECTIONS items are in progress."""
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(NUM_CONNECTIONS, thread_name_prefix="storage") as pool:
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) == NUM_CONNECTIONS:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
