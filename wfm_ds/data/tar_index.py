"""Index of a tar file: one pass over its headers, kept on disk if there is a folder for it.

Nothing is extracted; a member's name is a key and never becomes a path.
"""

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
BLOCK_BYTES = 1 << 20  # of S3, read ahead at once: more than a header, less than a video
FORMAT = 2  # of the index files


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One file in a tar: all before the first dot of its name is the key, all after it the field."""

    key: str
    field: str  # in lower case, e.g. "mp4" or "left.png"
    offset: int  # of its first byte in the tar
    size: int  # bytes
    text: str | None = None  # of caption fields, if they are UTF-8 of a sensible length


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The members of one tar in their order. Not intact: damaged after the last of them."""

    version: tuple[str | int, ...]
    members: list[IndexEntry]
    intact: bool


def tar_index(address: str, cache_dir: Path | None) -> TarIndex:
    """Return the index of a local or S3 tar; from cache_dir if this version of the tar has one there, else read and put
    there.

    Raises DataError for a file that is missing or no uncompressed tar, StorageError where the storage fails.
    """
    try:
        version = storage.version(address)
    except FileNotFoundError as error:
        raise DataError(f"{address} does not exist: data.path must name tar files") from error
    digest = hashlib.sha256(json.dumps([FORMAT, *version]).encode()).hexdigest()
    kept = cache_dir / "tars" / digest[:2] / f"{digest}.json" if cache_dir else None
    if kept is not None and (stored := read_stored(kept, version)) is not None:
        return stored
    index = read_tar(address, version)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(kept, json.dumps(asdict(index)))
    return index


def read_stored(path: Path, version: tuple[str | int, ...]) -> TarIndex | None:
    """Read an index from its file, or None if there is none for this version."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if tuple(content["version"]) != version:
        return None
    return TarIndex(version, [IndexEntry(**member) for member in content["members"]], content["intact"])


def read_tar(address: str, version: tuple[str | int, ...]) -> TarIndex:
    """Read all headers and captions in one pass, which skips the media."""
    fs, path = storage.filesystem(address)
    members: list[IndexEntry] = []
    intact, size = True, int(version[1])
    with storage.answering(address), fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    LIVENESS.advance()
                    if info.offset_data + info.size > size:
                        intact = False
                        break
                    if info.isreg() and not info.issparse() and (member := member_of(tar, info)) is not None:
                        members.append(member)
                else:
                    # tarfile takes any header that it cannot read for the end, which is a block of zeros.
                    file.seek(tar.offset)
                    intact = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
        except (tarfile.TarError, EOFError) as error:
            if not members:
                raise DataError(f"{address} is not an uncompressed tar file ({error})") from error
            intact = False
    return TarIndex(version, members, intact)


def member_of(tar: tarfile.TarFile, info: tarfile.TarInfo) -> IndexEntry | None:
    """Return the entry of a member; None for names that begin with a dot or have none."""
    folder, name = os.path.split(info.name.removeprefix("./"))
    stem, _, field = name.partition(".")
    if not stem or not field:
        return None
    field, text = field.lower(), None
    if field in CAPTION_FIELDS and info.size <= MAX_CAPTION_BYTES:
        file = tar.extractfile(info)
        assert file is not None  # it is a regular file
        text = decoded(file.read())
    key = os.path.join(folder, stem).encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8, ids must
    return IndexEntry(key, field, info.offset_data, info.size, text)


def decoded(content: bytes) -> str | None:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
