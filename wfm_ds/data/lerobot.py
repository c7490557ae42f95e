"""`data.kind: lerobot`: episodes of LeRobot datasets in a folder, on S3 or on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import difflib
import glob
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from wfm_ds.data.action_space import ActionSpace
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.lerobot_info import (
    Episode,
    LeRobotInfo,
    download_files,
    download_metadata,
    find_roots,
    is_depth,
    read_episodes,
    read_file_ends,
    read_info,
)
from wfm_ds.data.media import video_duration
from wfm_ds.data.pixels import BadMedia
from wfm_ds.data.samples import Sample, SampleSet, is_encodable, media_from_path
from wfm_ds.data.trajectories import ACTIONS
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.storage.filesystem import is_repo_id, shorten_path
from wfm_ds.types import Prompt

MAX_PATTERNS = 1000  # files that are requested from the Hub by name; above, all files of their folders are requested
TASK_SEPARATOR = " | "  # between descriptions of the same task, as in nvidia/Cosmos3-DROID


class LeRobotSet(SampleSet):
    """The episodes of a LeRobot dataset, or of all LeRobot datasets below a folder. A sample is a whole episode.

    Ids are episode_000012, or PART/episode_000012 for a dataset below the folder.
    """

    def __init__(self, data: DataRecipe, path: str) -> None:
        """path: folder, s3:// address or Hub repository.

        Raises DataError if the dataset cannot be downloaded or read, or lacks a camera or feature of the recipe.
        """
        super().__init__(path)
        for part in read_parts(data, path):
            self._add_episodes(data, part)
        self.samples.sort(key=lambda sample: sample.id)
        self.check(data.max_bad_fraction)

    def _add_episodes(self, data: DataRecipe, part: DatasetPart) -> None:
        if ACTIONS in data.inputs:
            ActionSpace.from_recipe(data.actions).find_features(part.info.widths)
        num_several = 0
        with track_progress(part.episodes, "reading episodes", total=len(part.episodes)) as tracked:
            for episode in tracked:
                sample_id = f"{part.name}/episode_{episode.index:06}".lstrip("/")
                name = f"{self.source.rstrip('/')}/{sample_id}"
                texts = next(filter(None, map(split_task, episode.tasks)), None) or (data.prompt,)
                num_several += len(episode.tasks) > 1
                if texts[0] is None or not is_encodable(texts):
                    self.reject("no_prompt", name)
                    continue
                if episode.num_missing:
                    self.reject("short_video", f"{name}, {episode.num_missing} frames too short")
                    continue
                views = tuple(tuple(episode.cameras[name] for name in row) for row in part.views)
                self.samples.append(
                    Sample(
                        id=sample_id,
                        media=EpisodeVideo(name, views, part.info.fps, 0, episode.length),
                        prompt=Prompt(id=sample_id, text=texts[0]),
                        texts=texts if len(texts) > 1 else (),
                        rows=episode.rows,
                    )
                )
        if num_several:
            self.notes.append(f"{num_several} episodes have several tasks: the first one is their prompt")


@dataclass(frozen=True, slots=True)
class DatasetPart:
    """The selected episodes of one LeRobot dataset, and the cameras to show, as rows of the composed image."""

    name: str  # relative path below data.path; "" for the dataset at data.path
    info: LeRobotInfo
    views: Sequence[Sequence[str]]
    episodes: Sequence[Episode]

    @property
    def videos(self) -> set[str]:
        return {span.address for episode in self.episodes for span in episode.cameras.values()}


def read_parts(data: DataRecipe, path: str) -> list[DatasetPart]:
    """Return the dataset at `path`, or the datasets below it. Files on the Hub are downloaded. Raises DataError."""
    root = download_metadata(path, data.options.get("revision"))
    parts = read_selected_parts(data, root)
    if is_repo_id(path):
        download_files(path, os.path.basename(root), file_patterns(list_files(root, parts)))
    return parts


def list_missing_files(data: DataRecipe, repo: str, commit: str) -> list[str]:
    """Return patterns of the files that `read_parts` would still download from the Hub. Downloads the metadata."""
    root = download_metadata(repo, commit)
    names = list_files(root, read_selected_parts(data, root))
    return file_patterns({name for name in names if not os.path.isfile(os.path.join(root, name))})


def read_selected_parts(data: DataRecipe, root: str) -> list[DatasetPart]:
    parts = []
    for name, address in find_roots(root).items():
        info = read_info(address)
        views = choose_cameras(info, data.views)
        cameras = list({camera: None for row in views for camera in row})
        episodes = select_episodes(read_episodes(info, cameras), data.episodes, address)
        parts.append(DatasetPart(name, info, views, episodes))
    return parts


def list_files(root: str, parts: Sequence[DatasetPart]) -> set[str]:
    """Return the names of the files with rows and videos, relative to the folder `root` of the dataset."""
    files = {episode.rows.file for part in parts for episode in part.episodes}.union(*(part.videos for part in parts))
    return {os.path.relpath(file, root) for file in files}


def file_patterns(names: set[str]) -> list[str]:
    if len(names) > MAX_PATTERNS:
        return sorted({f"{glob.escape(os.path.dirname(name))}/*" for name in names})
    return sorted(map(glob.escape, names))


def check_video_files(sources: Sequence[tuple[DataRecipe, str]]) -> None:
    """Check that each video file of LeRobot datasets of version 3 ends when its last episode ends.

    sources: recipe and path of each dataset. Raises DataError if the two ends differ by more than half a frame. Files
    that cannot be opened are skipped.
    """
    parts = [part for data, path in sources for part in read_parts(data, path) if part.info.is_v3]
    checked = set[str]()
    for part in parts:
        ends, files = read_file_ends(part.info, list(part.episodes[0].cameras)), sorted(part.videos - checked)
        checked |= part.videos
        with track_progress(files, "checking videos", total=len(files)) as tracked:
            for file in tracked:
                with contextlib.suppress(BadMedia):
                    duration = video_duration(media_from_path(file))
                    if abs(duration - ends[file]) > 0.5 / part.info.fps:
                        raise DataError(
                            f"{shorten_path(file)} is {duration:.3f} s long, but its last episode ends at "
                            f"{ends[file]:.3f} s: correct from_timestamp and to_timestamp in meta/episodes"
                        )


def choose_cameras(info: LeRobotInfo, views: Sequence[Sequence[str]] | None) -> Sequence[Sequence[str]]:
    """Return the cameras to show, as rows of the composed image. views: data.views. None selects the only camera.

    Raises DataError if a camera does not exist or is not a colour video, or if `views` is None and there are several.
    """
    where, cameras = shorten_path(info.root), info.cameras
    if not cameras:
        stored = any(feature["dtype"] == "image" for feature in info.features.values())
        advice = "convert its images to videos with lerobot" if stored else "choose a dataset with cameras"
        raise DataError(f"{where} has no colour videos: {advice}")
    if views is None and len(cameras) > 1:
        raise DataError(f"{where} has {len(cameras)} cameras: set data.views to some of them: {', '.join(cameras)}")
    chosen = [[cameras[0]]] if views is None else views
    for name in (name for row in chosen for name in row if name not in cameras):
        nearest = difflib.get_close_matches(name, cameras, n=len(cameras), cutoff=0)
        what = f"has no camera {name}"
        if (feature := info.features.get(name)) is not None:
            what = f"has {name}, but " + ("depth videos cannot be read" if is_depth(feature) else "it is not a video")
        raise DataError(f"{where} {what}: change data.views. Its cameras are {', '.join(nearest)}")
    return chosen


def select_episodes(episodes: list[Episode], selection: str | None, where: str) -> list[Episode]:
    """Return the episodes in a slice such as `0:-500`. None selects all. Raises DataError if none remain."""
    if selection is None:
        return episodes
    selected = episodes[slice(*(int(number) if number else None for number in selection.split(":")))]
    if not selected:
        raise DataError(f"{shorten_path(where)} has {len(episodes)} episodes, none of which is in {selection}")
    return selected


def split_task(task: str) -> tuple[str, ...]:
    """Split a task into its descriptions at TASK_SEPARATOR. Returns () for a blank task."""
    return tuple(text for part in task.split(TASK_SEPARATOR) if (text := part.strip()))


def split_windows(samples: Sequence[Sample], num_frames: int, fps: float | None) -> list[Sample]:
    """Split episodes into windows of about the same length, with ids such as episode_000012#3.

    num_frames: frames of a clip. fps: frame rate of a clip; None: the recorded frame rate. A window is at least as long
    as a clip, unless the whole episode is shorter. Samples that are not episodes are returned unchanged.
    """
    windows = []
    for sample in samples:
        video = sample.media
        if not isinstance(video, EpisodeVideo):
            windows.append(sample)
            continue
        clip = num_frames if fps is None else math.ceil((num_frames - 1) * video.fps / fps) + 1
        count = max(1, video.length // clip)
        edges = [video.length * i // count for i in range(count + 1)]
        for number in range(count):
            first, length, name = edges[number], edges[number + 1] - edges[number], f"{sample.id}#{number}"
            windows.append(
                replace(
                    sample,
                    id=name,
                    media=replace(video, name=f"{video.name}#{number}", first=first, length=length),
                    prompt=replace(sample.prompt, id=name),
                )
            )
    return windows
