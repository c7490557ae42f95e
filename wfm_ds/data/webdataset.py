"""Tar shards (WebDataset), local or on S3. Members are read by byte range and not extracted to files."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar

from wfm_ds.data.input_files import input_suffixes
from wfm_ds.data.media_inputs import NO_INPUTS, MediaInputs
from wfm_ds.data.samples import (
    MEDIA_SUFFIXES,
    Media,
    Sample,
    SampleSet,
    decode_text,
    make_prompt,
    parse_object,
    to_printable,
)
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.storage import atomic
from wfm_ds.storage import filesystem as storage
from wfm_ds.types import Prompt

CAPTION_FIELDS = ("json", "txt")
MAX_CAPTION_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20  # S3 read-ahead: larger than a header, smaller than a video
FORMAT = 2  # version of the index files


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A file KEY.FIELD in a tar. The name is split at the first dot into the key of the sample and the field."""

    key: str
    field: str  # in lower case, e.g. "mp4" or "left.png"
    offset: int  # position of its first byte in the tar
    size: int  # bytes
    text: str | None = None  # content of caption fields in UTF-8, up to MAX_CAPTION_BYTES


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The members of a tar, in the order of the file. intact: False if the tar is damaged after the last member."""

    version: tuple[str | int, ...]
    members: list[IndexEntry]
    intact: bool


def load_tar_index(address: str, cache_dir: Path | None) -> TarIndex:
    """Return the index of a local or S3 tar, from cache_dir if the tar has not changed.

    Raises DataError if the file is missing or not an uncompressed tar, and StorageError if it cannot be read.
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
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if tuple(content["version"]) == version:
            return TarIndex(version, [IndexEntry(**member) for member in content["members"]], content["intact"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def scan_tar(address: str, version: tuple[str | int, ...]) -> TarIndex:
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
    key = to_printable(os.path.join(folder, stem))  # ids must be UTF-8, tar names need not
    return IndexEntry(key, field, info.offset_data, info.size, text)


ARRAY_SUFFIX = "npy"  # actions and camera paths (data/inputs.py)
NUM_READERS = 16  # tars indexed in parallel, mostly waiting for I/O


@dataclass(frozen=True, slots=True)
class TarMember:
    """An image, video or array in a tar."""

    shard: str
    version: tuple[str | int, ...]  # version of the tar
    member: IndexEntry

    @property
    def name(self) -> str:
        return to_printable(f"{self.shard}#{self.member.key}.{self.member.field}")

    @property
    def suffix(self) -> str:
        return "." + self.member.field.rpartition(".")[2]

    def open(self) -> BinaryIO:
        return io.BytesIO(storage.read_range(self.shard, self.member.offset, self.member.size))

    def identity(self) -> tuple[str | int, ...]:
        return *self.version, self.member.offset, self.member.size

    def has_role(self, role: str) -> bool:
        """Return whether this is an image or video KEY.ROLE.EXT."""
        stem, suffix = os.path.splitext(self.member.field)
        return stem == role and suffix in MEDIA_SUFFIXES


class TarShards(SampleSet):
    """Captioned images and videos in tar files. Consecutive members with the same key form a sample.

    The caption is the key `prompt` of the .json member. If there is none, it is the .txt member, and the .json member
    becomes metadata. Ids are FOLDER/SHARD/KEY, where SHARD is the name of the tar file without .tar. Input images are
    members such as KEY.source.png.
    """

    content: ClassVar = "captioned media"  # for messages
    incomplete: ClassVar = "no_media"  # reason to reject a sample that lacks an image or video

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        cache_dir: Path | None,
        max_bad_fraction: float,
        inputs: MediaInputs = NO_INPUTS,
    ) -> None:
        """patterns: paths and s3:// addresses with {000..123} and globs. cache_dir: folder for cached indices.

        Raises DataError if a shard is missing, if two shards have equal file and folder names, if there is no usable
        sample, or if more than max_bad_fraction of the entries are bad.
        """
        super().__init__(", ".join(patterns))
        self._inputs = inputs
        shards = list(dict.fromkeys(address for pattern in patterns for address in storage.expand_pattern(pattern)))
        prefixes = unique_shard_names(shards)
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tar") as pool:
            loaded = pool.map(lambda address: load_tar_index(address, cache_dir), shards)
            with track_progress(loaded, "indexing tar files", total=len(shards)) as tracked:
                indices = list(tracked)
        for shard, prefix, index in zip(shards, prefixes, indices, strict=True):
            self._add_shard(shard, prefix, index)
        if not self.samples and not self.bad:
            raise DataError(f"{self.source}: no {self.content} in {len(shards)} tar files")
        self.samples.sort(key=lambda sample: sample.id)
        self.check(max_bad_fraction)

    def _add_shard(self, shard: str, prefix: str, index: TarIndex) -> None:
        seen_keys: set[str] = set()
        for key, group in itertools.groupby(index.members, key=lambda member: member.key):
            members = [TarMember(shard, index.version, member) for member in group]
            self._add_sample(f"{shard}#{key}", f"{prefix}/{key}", members, duplicate=key in seen_keys)
            seen_keys.add(key)
        if not index.intact:
            self.reject("shard", shard)

    def _list_media(self, members: Sequence[TarMember]) -> list[list[TarMember]]:
        """Return the candidates for each image or video of a sample: one list, or two for a preference pair."""
        media = [member for member in members if f".{member.member.field}" in MEDIA_SUFFIXES]
        if not media and not self._inputs.has_target:
            media = [member for member in members if member.has_role(self._inputs.original)]
        return [media]

    def _add_sample(self, name: str, sample_id: str, members: Sequence[TarMember], *, duplicate: bool) -> None:
        media = self._list_media(members)
        captions = {one.member.field: one.member.text for one in members if one.member.field in CAPTION_FIELDS}
        roles = {role: [member for member in members if member.has_role(role)] for role in self._inputs.names}
        images: dict[str, Media] = {
            role: files[0]
            for role, files in roles.items()
            if len(files) == 1 and files[0].suffix in input_suffixes(role)
        }
        if not captions and not any(media):
            return
        if duplicate or any(len(files) > 1 for files in media):
            self.reject("ambiguous", name)
        elif not all(media):
            self.reject(self.incomplete, name)
        elif not captions:
            self.reject("no_json", name)
        elif (prompt := parse_prompt(captions.get("json"), captions.get("txt"), sample_id)) is None:
            self.reject("no_prompt", name)
        elif isinstance(assigned := self._inputs.assign(media[0][0], images), str):
            self.reject(assigned, name)
        else:
            rejected = media[1][0] if len(media) > 1 else None
            arrays = [one for one in members if rejected is None and one.member.field.endswith(ARRAY_SUFFIX)]
            files = {os.path.basename(f"{one.member.key}.{one.member.field}"): one for one in arrays}
            self.samples.append(
                Sample(
                    id=sample_id, media=assigned[0], prompt=prompt, rejected=rejected, images=assigned[1], files=files
                )
            )


def parse_prompt(json_text: str | None, plain_text: str | None, sample_id: str) -> Prompt | None:
    """Return the prompt of a sample's .json or .txt caption. Returns None if neither is valid."""
    caption = parse_object((json_text or "").encode()) or {}
    if (prompt := make_prompt(caption, sample_id)) is not None or plain_text is None or not plain_text.strip():
        return prompt
    return Prompt(id=sample_id, text=plain_text.strip(), metadata=caption)


def unique_shard_names(shards: Sequence[str]) -> list[str]:
    """Return FOLDER/NAME of each shard, without .tar. Raises DataError if two of them are equal."""
    shard_by_name: dict[str, str] = {}
    for shard in shards:
        path = PurePosixPath(shard)
        name = to_printable(f"{path.parent.name}/{path.name.removesuffix('.tar')}")
        if name in shard_by_name:
            raise DataError(
                f"{shard_by_name[name]} and {shard} would have the same sample ids {name}/...: rename a folder"
            )
        shard_by_name[name] = shard
    return list(shard_by_name)
