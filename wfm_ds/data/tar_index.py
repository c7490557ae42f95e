"""Index of a tar file, built from its headers and optionally cached on disk. No member is extracted to a file."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage import atomic
from wfm_ds.storage import filesystem as storage

CAPTION_FIELDS = ("json", "txt")
MAX_CAPTION_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20  # S3 read-ahead: larger than a header, smaller than a video
FORMAT = 2  # version of the index files


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A file in a tar. Its name KEY.FIELD is split at the first dot into the key of the sample and the field."""

    key: str
    field: str  # in lower case, e.g. "mp4" or "left.png"
    offset: int  # position of its first byte in the tar
    size: int  # bytes
    text: str | None = None  # content of caption fields in UTF-8, up to MAX_CAPTION_BYTES


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The members of one tar, in order.

    intact: False if the tar is damaged after the last member in the list.
    """

    version: tuple[str | int, ...]
    members: list[IndexEntry]
    intact: bool


def load_tar_index(address: str, cache_dir: Path | None) -> TarIndex:
    """Return the index of a local or S3 tar.

    An index in cache_dir is used if the tar has not changed since it was cached. Raises DataError if the file is
    missing or not an uncompressed tar, and StorageError if it cannot be read.
    """
    try:
        version = storage.file_version(address)
    except FileNotFoundError as error:
        raise DataError(f"{address} not found: data.path must list tar files") from error
    digest = hashlib.sha256(json.dumps([FORMAT, *version]).encode()).hexdigest()
    cache_file = cache_dir / "tars" / digest[:2] / f"{digest}.json" if cache_dir else None
    if cache_file is not None and (cached_index := read_index_file(cache_file, version)) is not None:
        return cached_index
    index = scan_tar(address, version)
    if cache_file is not None:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(cache_file, json.dumps(asdict(index)))
    return index


def read_index_file(path: Path, version: tuple[str | int, ...]) -> TarIndex | None:
    """Return the cached index. Returns None if there is none, or if the tar has changed since it was cached."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if tuple(content["version"]) != version:
        return None
    return TarIndex(version, [IndexEntry(**member) for member in content["members"]], content["intact"])


def scan_tar(address: str, version: tuple[str | int, ...]) -> TarIndex:
    """Read all headers and captions of a tar in one pass. Images and videos are skipped."""
    fs, path = storage.open_filesystem(address)
    members: list[IndexEntry] = []
    intact, size = True, int(version[1])
    with (
        storage.convert_storage_errors(address),
        fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead") as file,
    ):
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    LIVENESS.record_progress()
                    if info.offset_data + info.size > size:
                        intact = False
                        break
                    if info.isreg() and not info.issparse() and (member := index_member(tar, info)) is not None:
                        members.append(member)
                else:
                    # tarfile also stops at an unreadable header; only a block of zeros is the real end.
                    file.seek(tar.offset)
                    intact = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
        except (tarfile.TarError, EOFError) as error:
            if not members:
                raise DataError(f"{address} is not an uncompressed tar file ({error})") from error
            intact = False
    return TarIndex(version, members, intact)


def index_member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IndexEntry | None:
    """Return the index entry of a tar member. Returns None for hidden files and for names without a dot."""
    folder, name = os.path.split(info.name.removeprefix("./"))
    stem, _, field = name.partition(".")
    if not stem or not field:
        return None
    field, text = field.lower(), None
    if field in CAPTION_FIELDS and info.size <= MAX_CAPTION_BYTES:
        file = tar.extractfile(info)
        assert file is not None  # regular files always have content
        text = decode_text(file.read())
    key = (
        os.path.join(folder, stem).encode("utf-8", "backslashreplace").decode()
    )  # ids must be UTF-8, tar names need not
    return IndexEntry(key, field, info.offset_data, info.size, text)


def decode_text(content: bytes) -> str | None:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
