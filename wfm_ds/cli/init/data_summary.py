"""Summary of a data folder or file: its images, videos, actions, preference pairs, prompts or conversations."""

from __future__ import annotations

import contextlib
import itertools
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.folder import find_conversations, format_count, load_folder
from wfm_ds.data.folder_layout import FolderLayout, detect_layout, has_conversations, is_lerobot, list_names
from wfm_ds.data.input_files import CAMERA_KEY
from wfm_ds.data.lerobot_info import find_roots, read_info
from wfm_ds.data.media import media_size, open_video, read_timestamps
from wfm_ds.data.media_inputs import ANY_INPUTS
from wfm_ds.data.pixels import BadMedia
from wfm_ds.data.preference_pairs import load_pairs
from wfm_ds.data.prompts import PROMPT_FORMATS, read_prompts
from wfm_ds.data.sample_sets import build_sample_set
from wfm_ds.data.samples import VIDEO_SUFFIXES, Media, Sample, SampleSet
from wfm_ds.errors import DataError
from wfm_ds.language.annotations import BadConversation, Conversation, parse_conversation, read_rows
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.storage.filesystem import is_remote
from wfm_ds.storage.json_lines import read_json_rows
from wfm_ds.types import IMAGE_INPUTS

DataContent = Literal["media", "pairs", "prompts", "conversations"]
Task = Literal["sft", "actions", "dpo", "rl", "distill", "reasoner"]

MAX_MEASURED = 200  # number of files to measure
MAX_PROBED = 100  # members of a tar file, or rows of annotations, that show what the file contains
MEDIA_FOLDERS = ("", "images", "videos", "media")  # where annotations in the same folder may have their images


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Contents of a data folder or file, as far as a recipe depends on them."""

    path: Path
    content: DataContent
    description: str
    num_samples: int
    recipe_path: str  # value of data.path
    kind: str = "folder"  # value of data.kind of images and videos
    views: Sequence[Sequence[str]] | None = None  # value of data.views
    fps: float | None = None  # frame rate of a LeRobot dataset
    sizes: Sequence[tuple[int, int]] = ()  # height and width of the measured files
    frame_counts: Sequence[int] = ()  # of the measured videos
    metadata_keys: frozenset[str] = frozenset()  # keys that all samples or prompts have: inputs, metadata of rewards
    has_target: bool = True  # False: the images are sources of edits, without edited images
    media_path: str | None = None  # folder of the images and videos of conversations

    @property
    def are_videos(self) -> bool:
        return 2 * len(self.frame_counts) > len(self.sizes)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks for which this data can be used. The first is the default."""
        if not self.has_target:
            return ("rl",)
        if self.content == "media":
            return ("actions", "sft", "rl") if "actions" in self.metadata_keys and self.are_videos else ("sft", "rl")
        tasks: dict[DataContent, tuple[Task, ...]] = {
            "pairs": ("dpo",),
            "prompts": ("rl", "distill"),
            "conversations": ("reasoner",),
        }
        return tasks[self.content]


def read_data(path: Path, *, prompt: str | None = None, media_path: str | None = None) -> DataSummary:
    """Find out what a folder or file contains, and measure some of its images and videos.

    prompt: caption for files without one. media_path: folder of the images and videos of conversations. Raises
    DataError if the data is missing, damaged or of an unknown kind.
    """
    if path.is_file():
        if has_conversations(path):
            return read_conversations(path, media_path)
        if path.suffix == ".jsonl" and has_pairs(path):
            return read_pairs(path, str(path))
        if path.suffix in (".txt", ".jsonl"):
            return read_prompt_file(path)
        raise DataError(
            f"{path} is not data for training: expected a folder, a .txt or .jsonl file of prompts, a .jsonl file of "
            "preference pairs, or a .json or .jsonl file of conversations (docs/data.md)"
        )
    if is_lerobot(path):
        return read_lerobot(path, prompt)
    layout = detect_layout(path)
    if layout.kind == "webdataset" and has_pair_members(path):
        return read_pairs(path, str(path / "*.tar"))
    if layout.kind == "media" and (file := find_conversations(path)) is not None:
        return read_conversations(file, media_path)
    sample_set, has_target = load_media_folder(path, layout, prompt)
    fields = {"path": path, "recipe_path": str(path), "metadata_keys": find_shared_keys(sample_set.samples)}
    return measure_samples(sample_set, "media", has_target=has_target, **fields)


def has_pairs(file: Path) -> bool:
    row = next(read_json_rows(file), {})
    return "chosen" in row and "rejected" in row


def has_pair_members(folder: Path) -> bool:
    first = folder / list_names(folder)[0]
    try:
        with tarfile.open(first) as tar:
            return any(".chosen." in member.name for member in itertools.islice(tar, MAX_PROBED))
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{first} cannot be read as a tar file: {error}") from error


def load_media_folder(folder: Path, layout: FolderLayout, prompt: str | None) -> tuple[SampleSet, bool]:
    """Return the samples of a folder with all their input images, and whether they have targets.

    A table with sources but without edited images has no targets.
    """
    data = DataRecipe(kind="folder", path=str(folder), prompt=prompt)
    try:
        return load_folder(data, folder, layout, ANY_INPUTS), True
    except DataError as error:
        if layout.kind == "table":
            with contextlib.suppress(DataError):
                return load_folder(data, folder, layout, replace(ANY_INPUTS, has_target=False)), False
        raise error


def find_shared_keys(samples: Sequence[Sample]) -> frozenset[str]:
    """Return the metadata keys and input images that all samples have."""
    keys = []
    for sample in samples:
        camera = sample.prompt.metadata.get(CAMERA_KEY)
        names = {*sample.prompt.metadata, *(camera if isinstance(camera, dict) else ())}
        keys.append(frozenset(names - IMAGE_INPUTS | sample.images.keys()))
    return frozenset[str].intersection(*keys)


def read_lerobot(folder: Path, prompt: str | None) -> DataSummary:
    info = read_info(next(iter(find_roots(str(folder)).values())))
    views = [info.cameras[:1]] if len(info.cameras) > 1 else None
    sample_set = build_sample_set(
        DataRecipe(kind="lerobot", path=str(folder), views=views, prompt=prompt), [str(folder)]
    )
    keys = frozenset({"actions"} if "action" in info.widths else ())
    described = {"kind": "lerobot", "views": views, "fps": info.fps}
    return measure_samples(sample_set, "media", path=folder, recipe_path=str(folder), metadata_keys=keys, **described)


def read_pairs(path: Path, recipe_path: str) -> DataSummary:
    data = DataRecipe(kind="pairs", path=recipe_path)
    sample_set = load_pairs([recipe_path], cache_dir=None, max_bad_fraction=data.max_bad_fraction, inputs=ANY_INPUTS)
    keys = find_shared_keys(sample_set.samples)
    return measure_samples(sample_set, "pairs", path=path, recipe_path=recipe_path, metadata_keys=keys)


def measure_samples(sample_set: SampleSet, content: DataContent, **fields: Any) -> DataSummary:
    selected: list[Sample] = sample_set.samples[:: -(-len(sample_set.samples) // MAX_MEASURED)]
    sizes, frame_counts = [], []
    for sample in selected:
        try:
            size = media_size(sample.media)
            if sample.media.suffix in VIDEO_SUFFIXES:
                frame_counts.append(count_frames(sample.media))
        except BadMedia:
            continue  # training skips such files too
        sizes.append(size)
    if not sizes:
        raise DataError(
            f"{sample_set.source}: none of {len(selected)} files can be decoded, e.g. {selected[0].media.name}"
        )
    low, high, kind = min(sizes), max(sizes), "videos" if frame_counts else "images"
    count = format_count(len(sample_set.samples), "pairs" if content == "pairs" else kind)
    contents = f"{count} of {kind}" if content == "pairs" else count
    if "source" in fields.get("metadata_keys", ()):
        contents += " with sources" if fields.get("has_target", True) else " to edit"
    return DataSummary(
        content=content,
        description=f"{contents}, {low[1]} x {low[0]} to {high[1]} x {high[0]}",
        num_samples=len(sample_set.samples),
        sizes=sizes,
        frame_counts=frame_counts,
        **fields,
    )


def count_frames(media: Media) -> int:
    if isinstance(media, EpisodeVideo):
        return media.length
    with open_video(media) as container:
        return len(read_timestamps(container, container.streams.video[0])[0])


def read_prompt_file(file: Path) -> DataSummary:
    _, published = PROMPT_FORMATS.get(file.stem, ((), None))
    try:
        prompts = read_prompts(file, file.stem, published)
    except DataError:
        if published is None:
            raise
        prompts = read_prompts(file, file.stem, None)  # another file of the same name
    return DataSummary(
        path=file,
        content="prompts",
        description=format_count(len(prompts), "prompts"),
        num_samples=len(prompts),
        recipe_path=str(file.parent),
        # training does not read source images from prompt files
        metadata_keys=frozenset[str].intersection(*(frozenset(p.metadata) for p in prompts)) - IMAGE_INPUTS,
    )


def read_conversations(file: Path, media_path: str | None) -> DataSummary:
    """Read annotations for vision-language models, and find the folder of their images and videos.

    media_path: folder to which relative paths refer. None: find it. Raises DataError if no row is a conversation, or if
    none of the first images and videos is in the folder.
    """
    conversations: list[Conversation] = []
    bad: list[BadConversation] = []
    for name, row in read_rows(file):
        try:
            conversations.append(parse_conversation(row, name))
        except BadConversation as error:
            bad.append(error)
    if not conversations:
        raise bad[0] if bad else DataError(f"{file}: no rows")
    kinds = sorted({item.kind for conversation in conversations for item in conversation.media})
    addresses = [item.address for conversation in conversations[:MAX_PROBED] for item in conversation.media]
    return DataSummary(
        path=file,
        content="conversations",
        description=format_count(len(conversations), "conversations")
        + (f" with {' and '.join(kinds)}s" if kinds else ""),
        num_samples=len(conversations),
        recipe_path=str(file),
        media_path=find_media_folder(file, addresses, media_path),
    )


def find_media_folder(file: Path, addresses: Sequence[str], media_path: str | None) -> str | None:
    """Return the folder to which relative paths in annotations refer, or None if all paths are absolute.

    addresses: paths of the images and videos in some annotations. media_path: the folder, if the user named it. An S3
    folder is not checked. Raises DataError if none of the paths exists in the folder.
    """
    relative = [address for address in addresses if not address.startswith("/") and not is_remote(address)]
    if not relative or (media_path is not None and is_remote(media_path)):
        return media_path
    folders = [file.parent / name for name in MEDIA_FOLDERS]
    if media_path is not None:
        folders = [Path(media_path).expanduser()]
    for folder in folders:
        if any((folder / address).is_file() for address in relative):
            return str(folder)
    raise DataError(f"{file}: {relative[0]} not found in {folders[0]}: name the folder of the images with --media-path")
