"""Samples of SFT data: captioned media, the place of their bytes, and the entries of a data set that are bad."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from wfm_ds.errors import DataError
from wfm_ds.pipes.arrays import pack_arrays, unpack_arrays
from wfm_ds.seeds import uniform
from wfm_ds.storage.filesystem import is_remote, version
from wfm_ds.storage.regular import open_regular
from wfm_ds.storage.stream import open_stream
from wfm_ds.types import Prompt

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mkv", ".mov", ".avi"})
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES
REASONS = {
    "no_prompt": "no caption in it: unreadable, empty, text that UTF-8 cannot encode, or a JSON object without a "
    "non-empty string `prompt`",
    "no_media": "a caption without an image or video of the same name",
    "no_json": "an image or video without a caption of the same name",
    "ambiguous": "more than one image, video or caption has this name",
    "shard": "a tar file that is cut short or damaged: what stands before that is used",
    "no_pair": "no two images or videos to compare: `chosen` or `rejected` is missing, or both are one file",
}
NUM_SHOWN = 10


class Media(Protocol):
    """One image or video, wherever its bytes are."""

    @property
    def name(self) -> str:
        """Path or address, for messages."""

    @property
    def suffix(self) -> str:
        """Suffix in lower case, with its dot; one of MEDIA_SUFFIXES."""

    def open(self) -> BinaryIO:
        """Open a seekable stream of the bytes. Raises OSError."""

    def identity(self) -> tuple[str | int, ...]:
        """Return a key that changes when the bytes do, as far as that shows without reading them. Raises OSError."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    """Media in a file of its own."""

    file: str | Path  # text where there are many: a Path takes ten times the memory, and the time

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def name(self) -> str:
        return printable(os.fspath(self.file))

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.file)[1].lower()

    def open(self) -> BinaryIO:
        return open_regular(self.file)

    def identity(self) -> tuple[str | int, ...]:
        return file_identity(self.path)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Media in a file of a storage, s3://..."""

    address: str

    @property
    def name(self) -> str:
        return printable(self.address)

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.address)[1].lower()

    def open(self) -> BinaryIO:
        return open_stream(self.address)

    def identity(self) -> tuple[str | int, ...]:
        return version(self.address)


def file_at(address: str) -> Media:
    """The file of this path or address."""
    return StoredFile(address) if is_remote(address) else LocalFile(address)


def printable(name: str) -> str:
    r"""Return a name of the file system as text that UTF-8 can encode: it need not be UTF-8, but ids are hashed and
    messages are written. A byte that is none becomes \udcNN."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_encodable(value: Any) -> bool:
    r"""Return whether UTF-8 can encode all text of a JSON value. JSON may name half of a surrogate pair, "\ud800",
    which is no character: no tokenizer takes it, and no file or message can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def file_identity(path: Path) -> tuple[str | int, ...]:
    """Return (path, size, time of the last change). Raises OSError."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One captioned image or video, or a pair of them, not yet decoded."""

    id: str
    media: Media
    prompt: Prompt
    embedding: Path | None = None  # of the caption, precomputed: safetensors, or a pickle if the recipe allows it
    rejected: Media | None = None  # the one that `media` is preferred to, where samples are pairs
    files: Mapping[str, Media] = field(default_factory=dict)  # others of its tar by name: .npy, for data/inputs.py

    @property
    def all_media(self) -> list[Media]:
        """The image or video; of a pair the chosen one and the rejected one."""
        return [self.media] if self.rejected is None else [self.media, self.rejected]


class SampleSet:
    """Samples and bad entries of a data set, found by one scan; a kind of data set is a subclass whose constructor
    scans.

    `samples` is sorted by id; `bad` lists what cannot be used by reason (keys of REASONS), in the order of the scan.
    """

    def __init__(self, source: str) -> None:
        """`source` names the data set in messages."""
        self.source = printable(source)
        self.samples: list[Sample] = []
        self.bad: dict[str, list[str]] = {}
        self.notes: list[str] = []  # what the user should know of a data set that is otherwise fine, for the log

    def reject(self, reason: str, name: str) -> None:
        self.bad.setdefault(reason, []).append(printable(name))

    def check(self, max_bad_fraction: float) -> None:
        """Raise DataError if there is no usable sample, or if more than this share of the entries is bad."""
        num_bad = sum(map(len, self.bad.values()))
        num_entries = len(self.samples) + num_bad
        if not self.samples or num_bad > max_bad_fraction * num_entries:
            shown = [f"{name} ({REASONS[reason]})" for reason, names in self.bad.items() for name in names][:NUM_SHOWN]
            raise DataError(
                f"{self.source}: {num_bad} of {num_entries} entries cannot be used, data.max_bad_fraction allows "
                f"{max_bad_fraction:g}; repair or remove the first: {'; '.join(shown)}"
            )

    def drawn(self, training: Sequence[Sample]) -> list[Sample]:
        """Return the samples of an epoch: those that are trained on, some of them perhaps several times."""
        return list(training)

    def split(self, holdout: float) -> tuple[list[Sample], list[Sample]]:
        """Return (training, held-out) samples, both sorted by id; `holdout` is the expected share of the second, in [0,
        1).

        A hash of the id decides, so a sample keeps its side when others are added or removed. From two samples on,
        neither side is empty unless holdout is 0: the smallest hash is then held out, the largest trained on.
        """
        if holdout == 0 or len(self.samples) < 2:
            return list(self.samples), []
        draws = {sample.id: uniform(0, "holdout", sample.id) for sample in self.samples}
        ordered = sorted(draws.values())
        limit = min(max(holdout, ordered[0]), ordered[-2])
        held_out = [sample for sample in self.samples if draws[sample.id] <= limit]
        training = [sample for sample in self.samples if draws[sample.id] > limit]
        return training, held_out


def parse_caption(content: bytes, sample_id: str) -> Prompt | None:
    """Return the prompt of a JSON caption, or None if it has none. Keys besides the two texts become metadata."""
    caption = parse_object(content)
    if caption is None:
        return None
    text, negative = caption.pop("prompt", None), caption.pop("negative_prompt", None)
    if not isinstance(text, str) or not text.strip() or not isinstance(negative, str | None):
        return None
    return Prompt(id=sample_id, text=text.strip(), negative_text=negative, metadata=caption)


def parse_object(content: bytes) -> dict[str, Any] | None:
    """Return a JSON object whose text UTF-8 can encode, or None."""
    try:
        found = json.loads(content)  # bytes: UTF-8, 16 or 32, with or without a mark
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_encodable(found) else None


def pack_prompt(prompt: Prompt) -> list[Any]:
    """Return the JSON form of a prompt that came from a JSON file."""
    packed = [prompt.id, prompt.text, prompt.negative_text, dict(prompt.metadata)]
    return [*packed, pack_arrays(prompt.inputs)] if prompt.inputs else packed


def unpack_prompt(packed: Sequence[Any]) -> Prompt:
    prompt_id, text, negative_text, metadata, *inputs = packed
    told = unpack_arrays(inputs[0]) if inputs else {}
    return Prompt(id=prompt_id, text=text, negative_text=negative_text, metadata=metadata, inputs=told)
