"""Metadata of LeRobot datasets, versions 2.0, 2.1 and 3.0, local, on S3 or on the Hugging Face Hub.

The metadata lists the cameras, the features, and the files of each episode.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wfm_ds.data.episode import CameraSpan
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.folder_layout import LEROBOT_DEPTH, LEROBOT_INFO
from wfm_ds.data.samples import media_from_path
from wfm_ds.errors import DataError, UserError
from wfm_ds.storage.filesystem import (
    LFS_ADVICE,
    LFS_SIGN,
    convert_storage_errors,
    is_repo_id,
    open_filesystem,
    shorten_error,
    shorten_path,
)
from wfm_ds.storage.json_lines import split_lines

VERSIONS = ("v2.0", "v2.1", "v3.0")
BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")  # features without robot data
META_FILES = ("meta/*", "*/meta/*")
DAMAGE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)  # of damaged metadata


@dataclass(frozen=True, slots=True)
class LeRobotInfo:
    """The content of meta/info.json."""

    root: str  # path or s3:// address of the dataset
    version: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    num_episodes: int
    data_path: str  # templates of file names
    video_path: str
    chunk_size: int  # episodes per folder of version 2

    @property
    def is_v3(self) -> bool:
        return self.version == "v3.0"

    @property
    def cameras(self) -> list[str]:
        """Names of the features with videos, except depth videos."""
        return [name for name, one in self.features.items() if one["dtype"] == "video" and not is_depth(one)]

    @property
    def widths(self) -> dict[str, int]:
        """{feature: numbers per frame} of the features in the parquet files."""
        widths = {}
        for name, one in self.features.items():
            if one["dtype"] not in ("video", "image", "string", "language") and name not in BOOKKEEPING:
                widths[name] = 1
                for size in one["shape"]:
                    widths[name] *= size
        return widths

    def join(self, name: str) -> str:
        return f"{self.root}/{name}"


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode: its tasks, and the positions of its rows and videos in the files of the dataset."""

    index: int
    length: int  # frames
    tasks: Sequence[str]
    rows: EpisodeRows
    cameras: Mapping[str, CameraSpan]
    num_missing: int = 0  # frames that its shortest video lacks, according to the metadata of version 3


def download_metadata(path: str, revision: str | None = None) -> str:
    """Download the metadata of a dataset on the Hub and return its local folder.

    A path that is not a Hub repository is returned unchanged. Raises DataError if the download fails.
    """
    return download_files(path, revision, META_FILES) if is_repo_id(path) else path


def download_files(repo: str, revision: str | None, patterns: Sequence[str]) -> str:
    """Download the files of a Hub dataset that match one of the patterns, unless they are in the Hub cache.

    Returns the snapshot folder in the Hub cache. Its name is the commit. Raises DataError if the download fails.
    """
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except (OSError, ValueError, RuntimeError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise DataError(
            f"{repo} is neither a folder nor a dataset that can be downloaded from the Hub ({shorten_error(error)}). "
            f"On a machine with network access: hf download --repo-type dataset {repo}"
        ) from error


def is_depth(feature: Mapping[str, Any]) -> bool:
    details = {**(feature.get("info") or {}), **(feature.get("video_info") or {})}
    return bool(details.get("is_depth_map") or details.get("video.is_depth_map"))


def find_roots(path: str) -> dict[str, str]:
    """Return {path relative to `path`: address} of the LeRobot datasets at or below a local or s3:// path.

    Returns {"": path} if `path` itself is a dataset. Raises DataError if there is none.
    """
    path = path.rstrip("/")
    fs, inner = open_filesystem(path)
    try:
        with convert_storage_errors(path):
            names = list_names(fs, inner, LEROBOT_DEPTH)
    except FileNotFoundError as error:
        raise DataError(f"{shorten_path(path)} not found: correct data.path") from error
    if not names:
        raise DataError(
            f"{shorten_path(path)} is not a LeRobot dataset: it has no {LEROBOT_INFO}, and no folder below it has one "
            "(docs/robots.md)"
        )
    return {name: f"{path}/{name}" if name else path for name in names}


def list_names(fs: Any, folder: str, depth: int) -> list[str]:
    """Return the relative paths of the LeRobot datasets at most `depth` levels below a folder.

    Returns [""] if the folder itself is a dataset.
    """
    if fs.isfile(f"{folder}/{LEROBOT_INFO}"):
        return [""]
    if depth == 0:
        return []
    below = sorted(entry["name"].rstrip("/") for entry in fs.ls(folder, detail=True) if entry["type"] == "directory")
    found = ((inner[len(folder) + 1 :], list_names(fs, inner, depth - 1)) for inner in below)
    return [f"{name}/{inner}".rstrip("/") for name, names in found for inner in names]


def read_info(root: str) -> LeRobotInfo:
    """Read meta/info.json.

    Raises DataError if it is missing or damaged, if its version is not supported, or if pyarrow is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f'{shorten_path(root)} needs pyarrow: pip install "wfm_ds[lerobot]"')
    with convert_damage(f"{root}/{LEROBOT_INFO}"):
        content = json.loads(read_file(f"{root}/{LEROBOT_INFO}"))
        version = str(content["codebase_version"])
        if version not in VERSIONS:
            raise DataError(
                f"{shorten_path(root)} has codebase_version {version}, but only {', '.join(VERSIONS)} can be read: "
                "convert it with the scripts of lerobot"
            )
        return LeRobotInfo(
            root=root,
            version=version,
            fps=float(content["fps"]),
            features=content["features"],
            num_episodes=int(content["total_episodes"]),
            data_path=content["data_path"],
            video_path=content.get("video_path") or "",
            chunk_size=int(content.get("chunks_size") or 1000),
        )


def read_episodes(info: LeRobotInfo, cameras: Sequence[str]) -> list[Episode]:
    """Return all episodes, sorted by index, with the positions of their videos from these cameras.

    Raises DataError if metadata is missing, damaged or incomplete, or if two episodes have the same index.
    """
    with convert_damage(info.join("meta/episodes" + ("" if info.is_v3 else ".jsonl"))):
        rows = sorted(read_rows(info), key=lambda row: row["episode_index"])
        for row, following in itertools.pairwise(rows):
            if row["episode_index"] == following["episode_index"]:
                raise DataError(
                    f"{shorten_path(info.root)} has two episodes {row['episode_index']}: remove one from meta/episodes"
                )
        if info.is_v3:
            check_spans(info, rows, cameras)
        episodes = list(list_episodes_v3(info, rows, cameras) if info.is_v3 else list_episodes_v2(info, rows, cameras))
    if len(episodes) < info.num_episodes:
        raise DataError(
            f"{shorten_path(info.root)} has {len(episodes)} of the {info.num_episodes} episodes that {LEROBOT_INFO} "
            "lists: download the rest of meta/"
        )
    if not episodes:
        raise DataError(f"{shorten_path(info.root)} has no episodes: choose another dataset")
    return episodes


def read_rows(info: LeRobotInfo) -> list[dict[str, Any]]:
    if not info.is_v3:
        return [json.loads(line) for _, line in split_lines(read_file(info.join("meta/episodes.jsonl")))]
    import pyarrow.parquet as pq

    fs, inner = open_filesystem(info.root)
    rows: list[dict[str, Any]] = []
    for file in sorted(fs.glob(f"{glob.escape(inner)}/meta/episodes/*/*.parquet")):
        table = pq.ParquetFile(io.BytesIO(read_file(info.join(file[len(inner) + 1 :]))))
        names = [name for name in table.schema_arrow.names if not name.startswith("stats/")]
        rows += table.read(columns=names).to_pylist()
    return rows


def list_episodes_v2(info: LeRobotInfo, rows: Sequence[Mapping[str, Any]], cameras: Sequence[str]) -> Iterator[Episode]:
    for row in rows:
        index, length = row["episode_index"], row["length"]
        place = {"episode_chunk": index // info.chunk_size, "episode_index": index}
        data = EpisodeRows(info.join(info.data_path.format(**place)), 0, length, index)
        videos = {name: CameraSpan(info.join(info.video_path.format(**place, video_key=name)), 0.0) for name in cameras}
        yield Episode(index, length, row.get("tasks") or (), data, videos)


def list_episodes_v3(info: LeRobotInfo, rows: Sequence[Mapping[str, Any]], cameras: Sequence[str]) -> Iterator[Episode]:
    first_rows: dict[str, int] = {}  # index of a file's first row in the whole dataset
    for row in rows:
        index, length = row["episode_index"], row["length"]
        file = info.data_path.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        first_row = first_rows.setdefault(file, row["dataset_from_index"])
        data = EpisodeRows(info.join(file), row["dataset_from_index"] - first_row, length, index)
        spans = {name: read_span(row, name) for name in cameras}
        videos = {name: CameraSpan(video_address(info, row, name), start) for name, (start, _) in spans.items()}
        num_missing = max((round(length - (end - start) * info.fps) for start, end in spans.values()), default=0)
        yield Episode(index, length, row.get("tasks") or (), data, videos, max(0, num_missing))


def read_span(row: Mapping[str, Any], camera: str) -> tuple[float, float]:
    """Return (start, end) of an episode in a camera's video file, in seconds. row: metadata of version 3."""
    return float(row[f"videos/{camera}/from_timestamp"]), float(row[f"videos/{camera}/to_timestamp"])


def video_address(info: LeRobotInfo, row: Mapping[str, Any], camera: str) -> str:
    place = {name: row[f"videos/{camera}/{name}"] for name in ("chunk_index", "file_index")}
    return info.join(info.video_path.format(video_key=camera, **place))


def list_spans(
    info: LeRobotInfo, rows: Sequence[Mapping[str, Any]], cameras: Sequence[str]
) -> dict[str, list[tuple[float, float, int]]]:
    """Return {video file: [(start in seconds, end in seconds, episode index)]}, sorted by start, for version 3."""
    spans = defaultdict[str, list[tuple[float, float, int]]](list)
    for row, camera in itertools.product(rows, cameras):
        spans[video_address(info, row, camera)].append((*read_span(row, camera), row["episode_index"]))
    return {file: sorted(parts) for file, parts in spans.items()}


def check_spans(info: LeRobotInfo, rows: Sequence[Mapping[str, Any]], cameras: Sequence[str]) -> None:
    """Raise DataError if the episodes in a video file of version 3 overlap or leave gaps of more than half a frame."""
    for file, spans in list_spans(info, rows, cameras).items():
        expected = 0.0
        for start, end, episode in spans:
            if abs(start - expected) > 0.5 / info.fps:
                raise DataError(
                    f"{shorten_path(file)}: episode {episode} starts at {start:.3f} s of the video, but the episode "
                    f"before it ends at {expected:.3f} s: correct from_timestamp and to_timestamp in meta/episodes"
                )
            expected = end


def read_file_ends(info: LeRobotInfo, cameras: Sequence[str]) -> dict[str, float]:
    """Return {video file: time in seconds at which its last episode ends} of a dataset of version 3."""
    spans = list_spans(info, read_rows(info), cameras)
    return {file: max(end for _, end, _ in parts) for file, parts in spans.items()}


@contextlib.contextmanager
def convert_damage(address: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{shorten_path(address)} not found: download the whole folder meta/") from error
    except DAMAGE_ERRORS as error:
        raise DataError(
            f"{shorten_path(address)} is damaged ({type(error).__name__}: {shorten_error(error)})"
        ) from error


def read_file(address: str) -> bytes:
    """Return the bytes of a local or s3:// file.

    Raises OSError or StorageError if reading fails, and DataError if the file is a Git LFS pointer.
    """
    with media_from_path(address).open() as file:
        content = file.read()
    if content.startswith(LFS_SIGN):
        raise DataError(f"{shorten_path(address)} is {LFS_ADVICE}")
    return content
