"""Folders with a caption file for each image or video: NAME.txt or NAME.json next to it, or the Cosmos layout."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wfm_ds.data.file_lists import FileFinder, files_by_id
from wfm_ds.data.folder_layout import demo_command
from wfm_ds.data.input_files import input_suffixes
from wfm_ds.data.media_inputs import NO_INPUTS, InputFolders, MediaInputs, single_files
from wfm_ds.data.samples import (
    IMAGE_SUFFIXES,
    MEDIA_SUFFIXES,
    VIDEO_SUFFIXES,
    LocalFile,
    Sample,
    SampleSet,
    decode_text,
    make_prompt,
    parse_object,
    to_printable,
)
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.storage import atomic
from wfm_ds.storage.filesystem import read_regular, shorten_path
from wfm_ds.types import MEDIA_INPUTS, Prompt

log = logging.getLogger(__name__)

CACHE_FORMAT = 3
RECENT_S = 60.0  # file system clocks tick every 2 s at worst, and a file server's clock may lag


class CaptionReader:
    """Reads the caption files of a folder. Caches the captions in CACHE/captions/<hash of the folder>.json.

    The file is {"format", "folder", "captions": {name: [state, caption]}}. A caption is reused only if the state of its
    file (size, times and inode) is unchanged. Captions of files that changed less than RECENT_S before the scan are not
    cached.
    """

    def __init__(self, folder: Path, cache_dir: Path | None) -> None:
        """Create the reader before the scan of the folder, and call `save` after it.

        cache_dir: folder CACHE of the caption cache, or None for no cache.
        """
        self.folder, self._start_ns = os.path.abspath(folder), time.time_ns()
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()
        self.file = None if cache_dir is None else cache_dir / "captions" / f"{digest}.json"
        self._previous = self._load()
        self._current: dict[str, list[Any]] = {}
        self._num_read = 0

    def read(self, path: str, parse: Callable[[bytes], Any]) -> Any:
        """Return the caption of a file, from the cache if possible. Returns None if the file cannot be read.

        parse: function that returns the caption, a JSON value, for the bytes of the file.
        """
        try:
            status = os.stat(path)
            state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            entry = self._previous.get(path)
            if entry is None or entry[0] != state:
                entry = [state, parse(read_regular(path))]
                self._num_read += 1
        except OSError:
            return None
        if max(status.st_mtime_ns, status.st_ctime_ns) < self._start_ns - RECENT_S * 1e9:
            self._current[path] = entry
        return entry[1]

    def save(self) -> None:
        if self.file is None or (not self._num_read and self._current.keys() == self._previous.keys()):
            return
        names = {os.path.relpath(path, self.folder): entry for path, entry in self._current.items()}
        content = {"format": CACHE_FORMAT, "folder": to_printable(self.folder), "captions": names}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.file, json.dumps(content, separators=(",", ":")))
        except OSError as error:
            log.info("caption cache of %s cannot be written, captions are read at each start: %s", self.folder, error)

    def _load(self) -> dict[str, list[Any]]:
        try:
            content = json.loads(self.file.read_bytes()) if self.file is not None else {}
            if content["format"] != CACHE_FORMAT or content["folder"] != to_printable(self.folder):
                return {}
            return {os.path.join(self.folder, name): entry for name, entry in content["captions"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}


TEXT_SUFFIXES = frozenset({".txt", ".caption"})
SUFFIXES = MEDIA_SUFFIXES | TEXT_SUFFIXES | {".json"}
MEDIA_FOLDERS = {"videos": VIDEO_SUFFIXES, "images": IMAGE_SUFFIXES}  # of a Cosmos folder
EMBEDDING_FOLDERS = ("text_embedding", "t5_xxl")
SAFE_SUFFIX, PICKLE_SUFFIXES = ".safetensors", (".pickle", ".pkl")


def require_media_folder(folder: Path) -> None:
    if os.path.isdir(folder):  # also False without permission
        return
    if not os.path.lexists(folder) and (command := demo_command(folder)) is not None:
        raise DataError(f"{shorten_path(folder)} not found. Create it: {command}")
    raise DataError(
        f"{shorten_path(folder)} is not a folder. Use a folder with NAME.txt or NAME.json next to each NAME.png or "
        "NAME.mp4"
    )


class CaptionedFolder(SampleSet):
    """Captioned images and videos in a folder. Ids are relative paths with forward slashes, without the last suffix.

    The caption is the value of `prompt` in NAME.json. If there is none, it is the text of NAME.txt or NAME.caption, and
    NAME.json only adds metadata. Subfolders and links are followed. Hidden files and other file types are ignored.

    An input image such as `source` is in an input folder, is named in NAME.json, or is NAME.source.png. Files such as
    NAME.mask.png without a caption are no samples, even if `inputs` does not name them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bad_fraction: float,
        cache_dir: Path | None = None,
        default: str | None = None,
        inputs: MediaInputs = NO_INPUTS,
    ) -> None:
        """cache_dir: see CaptionReader. default: caption for images and videos without a caption. None: such files are
        rejected.

        Raises DataError if there is no usable sample, or if more than max_bad_fraction of the entries are bad.
        """
        super().__init__(str(folder))
        self.folder, self.default, self._inputs = folder, default, inputs
        self._uncaptioned: set[str] = set()  # ids of images and videos without a caption
        self._input_files: set[str] = set()  # input files, used or not, that are not in input folders
        self._num_objects = self._num_texts = 0  # JSON files, and media with a text caption
        self.lone_texts: list[str] = []  # text files without media of that name: notes, or captions of missing files
        require_media_folder(folder)
        self._captions = CaptionReader(folder, cache_dir)
        self._input_folders, self._files = InputFolders(inputs, folder), FileFinder(Path())
        self._entries = files_by_id(folder, SUFFIXES)
        sample_ids = [sample_id for sample_id in sorted(self._entries) if not self._input_folders.contains(sample_id)]
        with track_progress(sample_ids, "reading captions", total=len(sample_ids)) as ids:
            for sample_id in ids:
                self._add_entry(sample_id, self._entries[sample_id])
        if not self.samples and not self.bad:
            raise DataError(self.empty_message())
        if not self._num_objects and len(self.lone_texts) < self._num_texts:
            for path in self.lone_texts:
                self.reject("no_media", path)
        self._captions.save()
        if self._input_files:
            self._drop_input_files()
        if num_default := sum(sample.id in self._uncaptioned for sample in self.samples):
            self.notes.append(f"{num_default} files without a caption use data.prompt")
        self.check(max_bad_fraction)

    def empty_message(self) -> str:
        return f"{self.source} has no captioned media: put NAME.txt or NAME.json next to each NAME.png or NAME.mp4"

    def _add_entry(self, sample_id: str, files: list[str]) -> None:
        suffixes = [(path, os.path.splitext(path)[1].lower()) for path in files]
        media, texts, objects = (
            [path for path, suffix in suffixes if suffix in group]
            for group in (MEDIA_SUFFIXES, TEXT_SUFFIXES, (".json",))
        )
        self._num_objects += len(objects)
        if not media and not objects:
            self.lone_texts += texts
        elif len(objects) > 1 or len(media) > 1:
            self.reject("ambiguous", min(objects + media))
        elif not media:
            self.reject("no_media", objects[0])
        else:
            self._add_media(sample_id, media[0], objects, texts)

    def _add_media(self, sample_id: str, media_file: str, objects: list[str], texts: list[str]) -> None:
        for name in MEDIA_INPUTS:
            self._input_files.update(map(os.path.normpath, self._entries.get(f"{sample_id}.{name}", [])))
        caption = (self._captions.read(objects[0], parse_object) or {}) if objects else {}
        prompt = make_prompt(caption, sample_id)
        if prompt is None and len(texts) > 1:
            self.reject("ambiguous", texts[0])
            return
        if prompt is None and texts and (text := self._captions.read(texts[0], join_lines)) is not None:
            prompt = Prompt(id=sample_id, text=text, metadata=caption)
            self._num_texts += 1
        if not objects and not texts:
            self._uncaptioned.add(sample_id)
            prompt = None if self.default is None else Prompt(id=sample_id, text=self.default)
        if prompt is not None:
            self._add_sample(media_file, prompt)
        elif objects or texts:
            self.reject("no_prompt", (objects + texts)[0])
        else:
            self.reject("no_json", media_file)

    def _add_sample(self, media_file: str, prompt: Prompt) -> None:
        assigned = self._inputs.assign(LocalFile(media_file), single_files(self._find_images(media_file, prompt)))
        if isinstance(assigned, str):
            self.reject(assigned, media_file)
            return
        media, images = assigned
        if images:
            metadata = {key: value for key, value in prompt.metadata.items() if key not in images}
            prompt = replace(prompt, metadata=metadata)
        self.samples.append(Sample(id=prompt.id, media=media, prompt=prompt, images=images))

    def _find_images(self, media_file: str, prompt: Prompt) -> dict[str, list[str]]:
        """Return {input name: image files} of a sample."""
        found = self._input_folders.find(prompt.id)
        for name in self._inputs.names:
            if name in found:
                continue
            if isinstance(value := prompt.metadata.get(name), str):
                path = self._files.find(os.path.join(os.path.dirname(media_file), value), input_suffixes(name))
                # Both names of one file must be equal, so that an image that is its own source is detected.
                files = [] if path is None else [media_file if path == os.path.normpath(media_file) else path]
            else:
                siblings = self._entries.get(f"{prompt.id}.{name}", [])
                files = [path for path in siblings if os.path.splitext(path)[1].lower() in input_suffixes(name)]
            self._input_files.update(os.path.normpath(path) for path in files if path != media_file)
            found[name] = files
        return found

    def _drop_input_files(self) -> None:
        """Drop images without captions or sources of their own that are input images of other samples."""
        self.samples = [
            sample
            for sample in self.samples
            if sample.id not in self._uncaptioned or os.path.normpath(sample.media.name) not in self._input_files
        ]
        for reason in ("no_json", "no_source"):
            names = [name for name in self.bad.pop(reason, []) if os.path.normpath(name) not in self._input_files]
            self.bad |= {reason: names} if names else {}


def join_lines(data: bytes) -> str | None:
    """Decode a text caption and join its lines with spaces. Returns None if it is empty or not UTF-8."""
    return " ".join(line.strip() for line in (decode_text(data) or "").splitlines() if line.strip()) or None


class CosmosFolder(SampleSet):
    """Captioned images and videos of a Cosmos folder. Ids are paths relative to metas/, without suffix."""

    def __init__(
        self, folder: Path, *, allow_pickle: bool = False, max_bad_fraction: float, cache_dir: Path | None = None
    ) -> None:
        """allow_pickle: also use text embeddings in pickle files. cache_dir: see CaptionReader.

        Raises DataError if there is no usable sample, or if more than max_bad_fraction of the entries are bad.
        """
        super().__init__(str(folder))
        if not (folder / "metas").is_dir() or not any((folder / name).is_dir() for name in MEDIA_FOLDERS):
            raise DataError(f"{folder} is not a Cosmos folder: it must contain metas/ and videos/ (or images/)")
        reader = CaptionReader(folder, cache_dir)
        captions = files_by_id(folder / "metas", {".txt"})
        media = [files_by_id(folder / name, suffixes) for name, suffixes in MEDIA_FOLDERS.items()]
        embeddings = find_embeddings(folder, allow_pickle=allow_pickle)
        ids = sorted(set(captions).union(*media))
        with track_progress(ids, "reading captions", total=len(ids)) as tracked_ids:
            for sample_id in tracked_ids:
                paths = [path for files in media for path in files.get(sample_id, [])]
                texts = captions.get(sample_id, [])
                if len(texts) > 1 or len(paths) > 1:
                    self.reject("ambiguous", (paths + texts)[0])
                elif not paths:
                    self.reject("no_media", texts[0])
                elif not texts:
                    self.reject("no_json", paths[0])
                elif (text := reader.read(texts[0], decode_caption)) is None:
                    self.reject("no_prompt", texts[0])
                else:
                    prompt, embedding = Prompt(id=sample_id, text=text), embeddings.get(sample_id)
                    self.samples.append(
                        Sample(id=sample_id, media=LocalFile(paths[0]), prompt=prompt, embedding=embedding)
                    )
        reader.save()
        self.check(max_bad_fraction)


def find_embeddings(folder: Path, *, allow_pickle: bool) -> dict[str, Path]:
    """Return {sample id: text embedding file}.

    Safetensors files take precedence over other types, and earlier folders of EMBEDDING_FOLDERS over later ones.
    """
    embeddings: dict[str, Path] = {}
    for suffix in (SAFE_SUFFIX, *(PICKLE_SUFFIXES if allow_pickle else ())):
        for name in EMBEDDING_FOLDERS:
            for sample_id, paths in files_by_id(folder / name, {suffix}).items():
                if os.path.isfile(paths[0]):  # skip pipes, which would block the read
                    embeddings.setdefault(sample_id, Path(paths[0]))
    return embeddings


def decode_caption(data: bytes) -> str | None:
    return (decode_text(data) or "").strip() or None
