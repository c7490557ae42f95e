"""Preference pairs: a chosen and a rejected image or video for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wfm_ds.data.file_lists import FileFinder
from wfm_ds.data.media_inputs import NO_INPUTS, MediaInputs, find_named_files
from wfm_ds.data.samples import MEDIA_SUFFIXES, LocalFile, Sample, SampleSet, parse_caption
from wfm_ds.data.webdataset import TarMember, TarShards
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import read_regular
from wfm_ds.storage.json_lines import split_lines

TABLE_SUFFIX = ".jsonl"
ROLES = ("chosen", "rejected")


def load_pairs(
    paths: Sequence[str], *, cache_dir: Path | None, max_bad_fraction: float, inputs: MediaInputs = NO_INPUTS
) -> SampleSet:
    """Scan preference pairs in a .jsonl file or in tar shards. Raises DataError."""
    if len(paths) == 1 and paths[0].lower().endswith(TABLE_SUFFIX):
        return PairTable(Path(paths[0]), max_bad_fraction=max_bad_fraction, inputs=inputs)
    return PairShards(paths, cache_dir=cache_dir, max_bad_fraction=max_bad_fraction, inputs=inputs)


class PairTable(SampleSet):
    """Preference pairs of a JSONL file. Each line has `prompt` and the relative paths `chosen` and `rejected`.

    The sample id is the value of `id`. If there is none, it is `CHOSEN > REJECTED`. Input images are keys such as
    `source` with relative paths. All other keys become metadata.
    """

    def __init__(self, table: Path, *, max_bad_fraction: float, inputs: MediaInputs = NO_INPUTS) -> None:
        super().__init__(str(table))
        try:
            content = read_regular(table)
        except OSError as error:
            raise DataError(
                f"{self.source} cannot be read ({error.strerror}): expected a {TABLE_SUFFIX} file"
            ) from error
        self._inputs, self._files = inputs, FileFinder(table.parent)
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
        paths = [self._files.find(name, MEDIA_SUFFIXES) for name in names]
        if None in paths or paths[0] == paths[1]:
            self.reject("no_pair", where)
            return
        explicit_id = metadata.pop("id", None)
        pair_id = " > ".join(names) if explicit_id is None else str(explicit_id)
        if pair_id in self._seen:
            self.reject("ambiguous", where)
            return
        chosen, rejected = (LocalFile(path) for path in paths if path is not None)
        images = find_named_files(self._files, {name: metadata.pop(name, None) for name in self._inputs.names})
        assigned = self._inputs.assign(chosen, images, is_pair=True)
        if isinstance(assigned, str):
            self.reject(assigned, where)
            return
        self._seen.add(pair_id)
        prompt = replace(prompt, id=pair_id, metadata=metadata)
        self.samples.append(Sample(id=pair_id, media=chosen, prompt=prompt, rejected=rejected, images=assigned[1]))


class PairShards(TarShards):
    """Preference pairs in tar files: KEY.chosen.EXT and KEY.rejected.EXT, with the caption KEY.json or KEY.txt."""

    content = "pairs (NAME.chosen.EXT and NAME.rejected.EXT)"
    incomplete = "no_pair"

    def _list_media(self, members: Sequence[TarMember]) -> list[list[TarMember]]:
        return [[member for member in members if member.has_role(role)] for role in ROLES]
