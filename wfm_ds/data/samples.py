"""Samples of a dataset: captioned images and videos in local or remote files, and the entries that a scan rejects."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from wfm_ds.errors import DataError
from wfm_ds.seeds import draw_uniform
from wfm_ds.storage.filesystem import file_version, is_remote, open_regular, open_stream
from wfm_ds.transport.arrays import pack_arrays, unpack_arrays
from wfm_ds.types import Prompt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
VIDEO_SUFFIXES = frozenset({".mp4", ".webm", ".mkv", ".mov", ".avi"})
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES
REASONS = {
    "no_prompt": "caption unreadable, empty, not encodable as UTF-8, or JSON without a non-empty string `prompt`",
    "no_media": "caption without image or video of the same name",
    "no_json": "image or video without caption of the same name",
    "ambiguous": "several images, videos or captions with this name",
    "shard": "truncated or damaged tar file; only samples before the damage are used",
    "short_video": "video shorter than the rows of its episode",
    "no_source": "without exactly one file for each input image or control video",
    "same_file": "an input image or video is the target itself, so the model would learn to copy",
    "no_pair": "pair without two different files: `chosen` or `rejected` is missing, or they are the same",
}
SOURCE_HINT = (
    ". docs/data_layouts.md shows how to store input images; for RL from instruction and source alone set data.target: "
    "false"
)
NUM_SHOWN = 10
MAX_GROWTH = 100  # maximum length of a mixture's epoch relative to the number of samples


class Media(Protocol):
    """An image or video, such as a local file, an S3 object or a tar member."""

    @property
    def name(self) -> str:
        """The path or address, for messages."""

    @property
    def suffix(self) -> str:
        """The file suffix in lower case, with the dot. It is one of MEDIA_SUFFIXES."""

    def open(self) -> BinaryIO:
        """Open the file as a seekable binary stream. Raises OSError."""

    def identity(self) -> tuple[str | int, ...]:
        """Return a key that changes when the content changes, without reading the content. Raises OSError."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    file: str | Path  # str for large datasets: Path needs ten times the memory and time

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def name(self) -> str:
        return to_printable(os.fspath(self.file))

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.file)[1].lower()

    def open(self) -> BinaryIO:
        return open_regular(self.file)

    def identity(self) -> tuple[str | int, ...]:
        return file_identity(self.path)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    address: str

    @property
    def name(self) -> str:
        return to_printable(self.address)

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.address)[1].lower()

    def open(self) -> BinaryIO:
        return open_stream(self.address)

    def identity(self) -> tuple[str | int, ...]:
        return file_version(self.address)


def media_from_path(address: str) -> Media:
    return RemoteFile(address) if is_remote(address) else LocalFile(address)


def to_printable(name: str) -> str:
    """Return a file name as valid UTF-8, for ids and messages. Each invalid byte NN becomes the text \\udcNN."""
    return name.encode("utf-8", "backslashreplace").decode()


def decode_text(content: bytes) -> str | None:
    """Decode UTF-8 with or without a byte order mark. Returns None for other content."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def is_encodable(value: Any) -> bool:
    """Return whether a JSON value can be encoded as UTF-8. Half of a surrogate pair, such as "\\ud800", cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def file_identity(path: Path) -> tuple[str | int, ...]:
    """Return (path, size in bytes, modification time in nanoseconds). Raises OSError."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A captioned image or video, or a preference pair. Its files are not decoded yet."""

    id: str
    media: Media
    prompt: Prompt
    embedding: Path | None = None  # precomputed text embedding: safetensors, or pickle if data.allow_pickle
    rejected: Media | None = None  # for pairs: the image or video that `media` is preferred to
    files: Mapping[str, Media] = field(default_factory=dict)  # .npy files of the same tar by name, for inputs
    images: Mapping[str, Media] = field(default_factory=dict)  # input images by name, such as `source` (IMAGE_INPUTS)
    rows: Mapping[str, npt.NDArray[np.float32]] | None = None  # features of the episode that `media` is a window of
    texts: tuple[str, ...] = ()  # captions, one of which is drawn in each epoch; if empty, the prompt's text is used

    @property
    def all_media(self) -> list[Media]:
        """The image or video of the sample. For a preference pair, the chosen one and the rejected one."""
        return [self.media] if self.rejected is None else [self.media, self.rejected]


class SampleSet:
    """Base class of scanned datasets. The constructor of a subclass scans one kind of dataset.

    `samples` is sorted by id. `bad` maps each reason (a key of REASONS) to the names of the rejected entries.
    """

    def __init__(self, source: str) -> None:
        """source: name of the dataset, for error messages."""
        self.source = to_printable(source)
        self.samples: list[Sample] = []
        self.bad: dict[str, list[str]] = {}
        self.notes: list[str] = []  # remarks for the log

    def reject(self, reason: str, name: str) -> None:
        """Record a rejected entry. reason: a key of REASONS."""
        self.bad.setdefault(reason, []).append(to_printable(name))

    def check(self, max_bad_fraction: float) -> None:
        """Raise DataError if there is no usable sample, or if more than max_bad_fraction of the entries are bad."""
        num_bad = sum(map(len, self.bad.values()))
        num_entries = len(self.samples) + num_bad
        if not self.samples or num_bad > max_bad_fraction * num_entries:
            entries = [f"{name} ({REASONS[reason]})" for reason, names in self.bad.items() for name in names]
            hint = SOURCE_HINT if "no_source" in self.bad and not self.samples else ""
            raise DataError(
                f"{self.source}: {num_bad} of {num_entries} samples are invalid "
                f"(data.max_bad_fraction: {max_bad_fraction:g}). First: {'; '.join(entries[:NUM_SHOWN])}{hint}"
            )

    def epoch_samples(self, training: Sequence[Sample]) -> list[Sample]:
        """Return the samples of one epoch. Subclasses may repeat training samples."""
        return list(training)

    def holdout_key(self, sample: Sample) -> str:
        """Return the text whose hash decides whether a sample is held out."""
        return sample.id

    def split_holdout(self, holdout: float) -> tuple[list[Sample], list[Sample]]:
        """Return (training samples, held-out samples), both sorted by id. The split uses `choose_held_out`."""
        is_held_out = choose_held_out([self.holdout_key(sample) for sample in self.samples], holdout)
        parts: tuple[list[Sample], list[Sample]] = ([], [])
        for sample, held_out in zip(self.samples, is_held_out, strict=True):
            parts[held_out].append(sample)
        return parts


def choose_held_out(ids: Sequence[str], holdout: float) -> list[bool]:
    """Return for each sample whether it is held out. A hash of its id decides.

    holdout: expected fraction of held-out samples, in [0, 1). If there are at least two ids and holdout > 0, at least
    one is held out and at least one is not.
    """
    draws = [draw_uniform(0, "holdout", sample_id) for sample_id in ids]
    ordered = sorted(set(draws))
    if holdout == 0 or len(ordered) < 2:
        return [False] * len(ids)
    limit = min(max(holdout, ordered[0]), ordered[-2])
    return [draw <= limit for draw in draws]


def parse_caption(content: bytes, sample_id: str) -> Prompt | None:
    """Parse a JSON caption. Returns None if it is invalid or has no prompt."""
    caption = parse_object(content)
    return None if caption is None else make_prompt(caption, sample_id)


def make_prompt(caption: Mapping[str, Any], sample_id: str) -> Prompt | None:
    """Return the prompt of a JSON caption, or None if it has none. Keys besides both prompts become metadata."""
    text, negative = caption.get("prompt"), caption.get("negative_prompt")
    if not isinstance(text, str) or not text.strip() or not isinstance(negative, str | None):
        return None
    metadata = {key: value for key, value in caption.items() if key not in ("prompt", "negative_prompt")}
    return Prompt(id=sample_id, text=text.strip(), negative_text=negative, metadata=metadata)


def parse_object(content: bytes) -> dict[str, Any] | None:
    """Parse a JSON object that can be encoded as UTF-8. Returns None for any other content."""
    try:
        value = json.loads(content)  # accepts UTF-8, UTF-16 and UTF-32, with or without BOM
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and is_encodable(value) else None


def pack_prompt(prompt: Prompt) -> list[Any]:
    packed = [prompt.id, prompt.text, prompt.negative_text, dict(prompt.metadata)]
    if prompt.viewpoint is not None:
        return [*packed, pack_arrays(prompt.inputs), prompt.viewpoint]
    return [*packed, pack_arrays(prompt.inputs)] if prompt.inputs else packed


def unpack_prompt(packed: Sequence[Any]) -> Prompt:
    prompt_id, text, negative, metadata, inputs, viewpoint = (*packed, None, None)[:6]
    arrays = unpack_arrays(inputs) if inputs else {}
    return Prompt(
        id=prompt_id, text=text, negative_text=negative, metadata=metadata, inputs=arrays, viewpoint=viewpoint
    )


def dataset_name(sample: Sample) -> str:
    return sample.id.partition("/")[0]


class SampleSetMixture(SampleSet):
    """A weighted mixture of named datasets. The sample ids are NAME/ID.

    The number of samples per epoch from each dataset is proportional to its weight. Every epoch contains each sample at
    least once, and repeats samples if the weights require it.
    """

    def __init__(self, sets: Mapping[str, tuple[SampleSet, float]]) -> None:
        super().__init__("data.sets")
        self.weights = {name: weight for name, (_, weight) in sets.items()}
        for name, (dataset, _) in sorted(sets.items()):
            self.samples += [rename_sample(sample, f"{name}/{sample.id}") for sample in dataset.samples]
            self.notes += [f"{name}: {note}" for note in dataset.notes]
            for reason, names in dataset.bad.items():
                for entry in names:
                    self.reject(reason, entry)
        self.samples.sort(key=lambda sample: sample.id)

    def holdout_key(self, sample: Sample) -> str:
        """Return FOLDER/EPISODE for an episode, which is equal in all datasets, and the id for other samples."""
        return sample.id if sample.rows is None else "/".join(sample.media.name.split("/")[-2:])

    def epoch_samples(self, training: Sequence[Sample]) -> list[Sample]:
        """Return an epoch's samples, including repeats.

        Raises DataError if the epoch would have more than MAX_GROWTH * len(training) samples.
        """
        by_dataset: dict[str, list[Sample]] = {name: [] for name in self.weights}
        for sample in training:
            by_dataset[dataset_name(sample)].append(sample)
        counts = epoch_counts({name: len(samples) for name, samples in by_dataset.items()}, self.weights)
        if sum(counts.values()) > MAX_GROWTH * len(training):
            rarest = min(counts, key=lambda name: counts[name] / max(1, len(by_dataset[name])))
            raise DataError(
                f"data.sets: weight of {rarest} too small: one epoch would need {sum(counts.values())} samples for "
                f"{len(training)} distinct ones. Raise the weight of {rarest}"
            )
        total = sum(counts.values())
        for name, count in counts.items():
            times = count / max(1, len(by_dataset[name]))
            share = f"{count / total:.0%} of an epoch, each {times:.3g} times per epoch"
            log.info("data.sets: %s: %d samples, %s", name, len(by_dataset[name]), share)
        return sorted(
            (item for name, samples in by_dataset.items() for item in repeat_samples(samples, counts[name])),
            key=lambda sample: sample.id,
        )


def epoch_counts(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Return {dataset: number of samples per epoch}. The numbers are proportional to the weights.

    No number is smaller than the size of its dataset. An empty dataset gets 0.
    """
    total = sum(weights[name] for name, size in sizes.items() if size)
    shares = {name: weights[name] / total if size else 0.0 for name, size in sizes.items()}
    length = max((sizes[name] / share for name, share in shares.items() if share), default=0.0)
    return {name: max(sizes[name], round(length * share)) for name, share in shares.items()}


def repeat_samples(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Repeat samples evenly until there are `count`. Repeats get new ids."""
    rounds, rest = divmod(count, len(samples)) if samples else (0, 0)
    extra = [samples[i * len(samples) // rest] for i in range(rest)]  # evenly spaced: neighbours may be similar
    copies = [*samples]
    for round_index in range(1, rounds):
        copies += [rename_sample(sample, f"{sample.id}#{round_index + 1}") for sample in samples]
    return copies + [rename_sample(sample, f"{sample.id}#{rounds + 1}") for sample in extra]


def rename_sample(sample: Sample, sample_id: str) -> Sample:
    return replace(sample, id=sample_id, prompt=replace(sample.prompt, id=sample_id))
