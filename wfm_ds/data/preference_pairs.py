"""Preference pairs: a chosen and a rejected image or video for each prompt."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Sample, SampleSet, parse_caption
from wfm_ds.data.webdataset import IndexEntry, TarIndex, TarMember, TarShards, parse_prompt
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import read_regular
from wfm_ds.storage.json_lines import split_lines

TABLE_SUFFIX = ".jsonl"
ROLES = ("chosen", "rejected")


def load_pairs(paths: Sequence[str], *, cache_dir: Path | None, max_bad_fraction: float) -> SampleSet:
    """Scan preference pairs in a .jsonl file or in tar shards. Raises DataError."""
    if len(paths) == 1 and paths[0].lower().endswith(TABLE_SUFFIX):
        return PairTable(Path(paths[0]), max_bad_fraction=max_bad_fraction)
    return PairShards(paths, cache_dir=cache_dir, max_bad_fraction=max_bad_fraction)


class PairTable(SampleSet):
    """Preference pairs of a JSONL file. Each line has `prompt` and the relative paths `chosen` and `rejected`.

    The sample id is the value of `id`. If there is none, it is `CHOSEN > REJECTED`. All other keys become metadata.
    """

    def __init__(self, table: Path, *, max_bad_fraction: float) -> None:
        super().__init__(str(table))
        try:
            content = read_regular(table)
        except OSError as error:
            raise DataError(
                f"{self.source} cannot be read ({error.strerror}): expected a {TABLE_SUFFIX} file"
            ) from error
        self._folder = table.parent
        # List each folder only once instead of checking two files per pair.
        self._names = functools.cache(list_folder)
        self._seen: set[str] = set()
        for number, line in split_lines(content):
            LIVENESS.record_progress()
            self._add_line(f"{table}:{number}", line)
        if not self.samples and not self.bad:
            raise DataError(f"{self.source} is empty: write one JSON object with prompt, chosen and rejected per line")
        self.samples.sort(key=lambda sample: sample.id)
        self.check(max_bad_fraction)

    def _add_line(self, where: str, line: bytes) -> None:
        prompt = parse_caption(line, where)
        if prompt is None:
            self.reject("no_prompt", where)
            return
        metadata = dict(prompt.metadata)
        names = [metadata.pop(role, None) for role in ROLES]
        paths = [self._resolve_path(name) for name in names]
        if None in paths or paths[0] == paths[1]:
            self.reject("no_pair", where)
            return
        explicit_id = metadata.pop("id", None)
        pair_id = " > ".join(names) if explicit_id is None else str(explicit_id)
        if pair_id in self._seen:
            self.reject("ambiguous", where)
            return
        self._seen.add(pair_id)
        chosen, rejected = (LocalFile(path) for path in paths if path is not None)
        prompt = replace(prompt, id=pair_id, metadata=metadata)
        self.samples.append(Sample(id=pair_id, media=chosen, prompt=prompt, rejected=rejected))

    def _resolve_path(self, name: Any) -> str | None:
        if not isinstance(name, str) or "\0" in name or os.path.splitext(name)[1].lower() not in MEDIA_SUFFIXES:
            return None
        path = os.path.normpath(self._folder / name)
        folder, file = os.path.split(path)
        return path if file in self._names(folder) else None


def list_folder(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


class PairShards(TarShards):
    """Preference pairs in tar files: KEY.chosen.EXT and KEY.rejected.EXT, with the caption KEY.json or KEY.txt."""

    content = "pairs (NAME.chosen.EXT and NAME.rejected.EXT)"

    def _add_sample(
        self, shard: str, prefix: str, index: TarIndex, key: str, members: list[IndexEntry], *, duplicate: bool
    ) -> None:
        media = {role: [member for member in members if is_pair_member(member, role)] for role in ROLES}
        captions = {member.field: member.text for member in members if member.field in ("json", "txt")}
        name, sample_id = f"{shard}#{key}", f"{prefix}/{key}"
        if not captions and not any(media.values()):
            return
        if duplicate or any(len(entries) > 1 for entries in media.values()):
            self.reject("ambiguous", name)
        elif not all(media.values()):
            self.reject("no_pair", name)
        elif not captions:
            self.reject("no_json", name)
        elif (prompt := parse_prompt(captions.get("json"), captions.get("txt"), sample_id)) is None:
            self.reject("no_prompt", name)
        else:
            chosen, rejected = (TarMember(shard, index.version, entries) for (entries,) in media.values())
            self.samples.append(Sample(id=sample_id, media=chosen, prompt=prompt, rejected=rejected))


def is_pair_member(member: IndexEntry, role: str) -> bool:
    stem, suffix = os.path.splitext(member.field)
    return stem == role and suffix in MEDIA_SUFFIXES
