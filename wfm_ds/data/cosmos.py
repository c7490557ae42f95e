"""The Cosmos folder layout: metas/NAME.txt, videos/NAME.mp4 or images/NAME.jpg, and optional text embeddings."""

from __future__ import annotations

import time
from pathlib import Path

from wfm_ds.data.caption_cache import CaptionCache, read_caption
from wfm_ds.data.captioned_folder import file_id, walk_paths
from wfm_ds.data.samples import IMAGE_SUFFIXES, VIDEO_SUFFIXES, LocalFile, Sample, SampleSet
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.errors import DataError
from wfm_ds.types import Prompt

MEDIA_FOLDERS = {"videos": VIDEO_SUFFIXES, "images": IMAGE_SUFFIXES}
EMBEDDING_FOLDERS = ("text_embedding", "t5_xxl")
SAFE_SUFFIX, PICKLE_SUFFIXES = ".safetensors", (".pickle", ".pkl")


class CosmosFolder(SampleSet):
    """Captioned images and videos of a Cosmos folder. Ids are paths relative to metas/, without suffix."""

    def __init__(
        self, folder: Path, *, allow_pickle: bool = False, max_bad_fraction: float, cache_dir: Path | None = None
    ) -> None:
        """Scan the folder.

        allow_pickle: also use text embeddings in pickle files. cache_dir: folder of the caption cache. None: captions
        are not cached. Raises DataError if there is no usable sample, or if more than max_bad_fraction of the entries
        are bad.
        """
        super().__init__(str(folder))
        if not (folder / "metas").is_dir() or not any((folder / name).is_dir() for name in MEDIA_FOLDERS):
            raise DataError(f"{folder} is not a Cosmos folder: it must contain metas/ and videos/ (or images/)")
        cache = None if cache_dir is None else CaptionCache(folder, cache_dir, now_ns=time.time_ns())
        captions = files_by_id(folder / "metas", frozenset({".txt"}))
        media = [files_by_id(folder / name, suffixes) for name, suffixes in MEDIA_FOLDERS.items()]
        embeddings = find_embeddings(folder, allow_pickle=allow_pickle)
        for sample_id in sorted(set(captions).union(*media)):
            LIVENESS.record_progress()
            paths = [path for files in media for path in files.get(sample_id, [])]
            self._add_sample(sample_id, captions.get(sample_id, []), paths, embeddings.get(sample_id), cache)
        if cache is not None:
            cache.save()
        self.check(max_bad_fraction)

    def _add_sample(
        self,
        sample_id: str,
        captions: list[Path],
        media: list[Path],
        embedding: Path | None,
        cache: CaptionCache | None,
    ) -> None:
        if len(captions) > 1 or len(media) > 1:
            self.reject("ambiguous", str((media + captions)[0]))
        elif not media:
            self.reject("no_media", str(captions[0]))
        elif not captions:
            self.reject("no_json", str(media[0]))
        elif (text := read_caption(str(captions[0]), cache, decode_caption)) is None:
            self.reject("no_prompt", str(captions[0]))
        else:
            prompt = Prompt(id=sample_id, text=text)
            self.samples.append(Sample(id=sample_id, media=LocalFile(media[0]), prompt=prompt, embedding=embedding))


def find_embeddings(folder: Path, *, allow_pickle: bool) -> dict[str, Path]:
    """Return {sample id: text embedding file}.

    If a sample has several files, a safetensors file is preferred, then the first folder in EMBEDDING_FOLDERS.
    """
    suffixes = (SAFE_SUFFIX, *(PICKLE_SUFFIXES if allow_pickle else ()))
    embeddings: dict[str, Path] = {}
    for suffix in suffixes:
        for name in EMBEDDING_FOLDERS:
            for sample_id, paths in files_by_id(folder / name, frozenset({suffix})).items():
                if paths[0].is_file():  # skip pipes, which would block the read
                    embeddings.setdefault(sample_id, paths[0])
    return embeddings


def files_by_id(folder: Path, suffixes: frozenset[str]) -> dict[str, list[Path]]:
    """Return {sample id: files with one of these suffixes}, or {} if the folder does not exist."""
    files: dict[str, list[Path]] = {}
    if folder.is_dir():
        for path in sorted(walk_paths(folder)):
            if path.suffix.lower() in suffixes:
                files.setdefault(file_id(path, folder), []).append(path)
    return files


def decode_caption(data: bytes) -> str | None:
    """Decode and strip the text of a caption file. Returns None if it is empty or not UTF-8."""
    try:
        return data.decode("utf-8-sig").strip() or None
    except UnicodeDecodeError:
        return None
