"""Tar shards (WebDataset), local or on S3. Members are read by byte range and not extracted to files."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, ClassVar

from wfm_ds.data.samples import MEDIA_SUFFIXES, Sample, SampleSet, is_encodable, parse_caption, to_printable
from wfm_ds.data.tar_index import IndexEntry, TarIndex, load_tar_index
from wfm_ds.errors import DataError
from wfm_ds.storage import filesystem as storage
from wfm_ds.types import Prompt

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


class TarShards(SampleSet):
    """Captioned images and videos in tar files. Consecutive members with the same key form a sample.

    A sample has one image or video and a caption. The caption is the key `prompt` of the .json member, or the .txt
    member. If the caption is a .txt member, a .json member without `prompt` becomes metadata. Ids are FOLDER/SHARD/KEY:
    the name of the shard's folder, the shard's file name without .tar, and the key.
    """

    content: ClassVar = "captioned media"  # for messages

    def __init__(self, patterns: Sequence[str], *, cache_dir: Path | None, max_bad_fraction: float) -> None:
        """Index the shards.

        patterns: paths and s3:// addresses, which may contain {000..123} and globs. cache_dir: folder for cached
        indices. Raises DataError if a shard is missing, if two shards have equal file and folder names, if there is no
        usable sample, or if more than max_bad_fraction of the entries are bad.
        """
        super().__init__(", ".join(patterns))
        shards = list(dict.fromkeys(address for pattern in patterns for address in storage.expand_pattern(pattern)))
        prefixes = unique_shard_names(shards)
        with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tar") as pool:
            indices = list(pool.map(lambda address: load_tar_index(address, cache_dir), shards))
        for shard, prefix, index in zip(shards, prefixes, indices, strict=True):
            self._add_shard(shard, prefix, index)
        if not self.samples and not self.bad:
            raise DataError(f"{self.source}: no {self.content} in {len(shards)} tar files")
        self.samples.sort(key=lambda sample: sample.id)
        self.check(max_bad_fraction)

    def _add_shard(self, shard: str, prefix: str, index: TarIndex) -> None:
        seen_keys: set[str] = set()
        for key, members in itertools.groupby(index.members, key=lambda member: member.key):
            self._add_sample(shard, prefix, index, key, list(members), duplicate=key in seen_keys)
            seen_keys.add(key)
        if not index.intact:
            self.reject("shard", shard)

    def _add_sample(
        self, shard: str, prefix: str, index: TarIndex, key: str, members: list[IndexEntry], *, duplicate: bool
    ) -> None:
        media = [member for member in members if f".{member.field}" in MEDIA_SUFFIXES]
        captions = {member.field: member.text for member in members if member.field in ("json", "txt")}
        name, sample_id = f"{shard}#{key}", f"{prefix}/{key}"
        if not media and not captions:
            return
        if duplicate or len(media) > 1:
            self.reject("ambiguous", name)
        elif not media:
            self.reject("no_media", name)
        elif not captions:
            self.reject("no_json", name)
        elif (prompt := parse_prompt(captions.get("json"), captions.get("txt"), sample_id)) is None:
            self.reject("no_prompt", name)
        else:
            self.samples.append(
                Sample(
                    id=sample_id,
                    media=TarMember(shard, index.version, media[0]),
                    prompt=prompt,
                    files={
                        f"{key.rpartition('/')[2]}.{member.field}": TarMember(shard, index.version, member)
                        for member in members
                        if member.field.endswith(ARRAY_SUFFIX)
                    },
                )
            )


def parse_prompt(json_text: str | None, plain_text: str | None, sample_id: str) -> Prompt | None:
    """Return the prompt in a sample's json or txt caption. Returns None if neither is valid."""
    if json_text is not None and (prompt := parse_caption(json_text.encode(), sample_id)) is not None:
        return prompt
    if plain_text is None or not plain_text.strip():
        return None
    try:
        metadata = json.loads(json_text or "{}")
        metadata = metadata if is_encodable(metadata) else {}
    except (ValueError, RecursionError):
        metadata = {}
    return Prompt(id=sample_id, text=plain_text.strip(), metadata=metadata if isinstance(metadata, dict) else {})


def unique_shard_names(shards: Sequence[str]) -> list[str]:
    """Return FOLDER/NAME of each shard, without .tar, for sample ids. Raises DataError if two of them are equal."""
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
