"""Statistics of the actions of a dataset, for data.actions.normalize."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wfm_ds.data.action_space import ActionSpace
from wfm_ds.data.episode import EpisodeVideo
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.input_files import READ_ERRORS, read_raw_input
from wfm_ds.data.samples import Sample, media_from_path
from wfm_ds.data.trajectories import ACTIONS, Floats
from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.progress import track_progress
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe
from wfm_ds.storage import atomic

log = logging.getLogger(__name__)

TITLE = "reading actions"
CACHE_VERSION = 1  # change it when the statistics of the same rows change
QUANTILES = {"q01": 0.01, "q99": 0.99}


def load_statistics(
    samples: Sequence[Sample], actions: ActionsRecipe, fps: float | None, cache_dir: Path | None
) -> dict[str, list[float]]:
    """Return the statistics of all actions in the samples' episodes or files (see `compute_statistics`).

    The statistics are cached in cache_dir/action_stats if cache_dir is set. fps: frame rate of the clips, or None for
    the recorded frame rate. Raises DataError if no actions can be read.
    """
    sources = unique_sources(samples)
    file = None
    if cache_dir is not None and (key := statistics_key(sources, actions, fps)) is not None:
        file = cache_dir / "action_stats" / f"{key}.json"
        if file.is_file():
            stored: dict[str, list[float]] = json.loads(file.read_text())
            return stored
    statistics = compute_statistics(read_all_actions(sources, actions, fps))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(statistics))
    return statistics


def compute_statistics(arrays: Sequence[Floats]) -> dict[str, list[float]]:
    """Return {statistic: one value per action component} over the rows of all arrays.

    The statistics are q01, q99, mean, std, min and max. Quantiles are interpolated linearly, and std divides by the
    number of rows. arrays: [actions, components] each. Raises DataError if their numbers of components differ.
    """
    if len(widths := {array.shape[1] for array in arrays}) > 1:
        raise DataError(
            f"data.actions.stats: the data has actions of {sorted(widths)} numbers: split it into data.sets"
        )
    rows = np.concatenate(arrays)
    statistics = {name: np.quantile(rows, at, axis=0, method="linear") for name, at in QUANTILES.items()}
    statistics |= {"mean": rows.mean(0, dtype=np.float64), "std": rows.std(0, dtype=np.float64)}
    statistics |= {"min": rows.min(0), "max": rows.max(0)}
    return {name: numbers.astype(np.float64).tolist() for name, numbers in statistics.items()}


def unique_sources(samples: Sequence[Sample]) -> list[Sample]:
    def key(sample: Sample) -> object:  # the windows of an episode share its rows
        return sample.media.name if sample.rows is None else id(sample.rows)

    return list({key(sample): sample for sample in reversed(samples)}.values())[::-1]


def statistics_key(sources: Sequence[Sample], actions: ActionsRecipe, fps: float | None) -> str | None:
    """Return a hash of everything that determines the statistics, or None if some samples are not stored episodes."""
    episodes = [sample.rows for sample in sources if sample.rows is not None]
    rows = [episode for episode in episodes if isinstance(episode, EpisodeRows)]
    if len(rows) < len(sources):
        return None
    files = sorted({row.file for row in rows})
    with track_progress(files, "looking up actions", total=len(files)) as tracked:
        versions = {file: find_version(file) for file in tracked}
    content = [[versions[row.file], row.start, row.length, row.episode] for row in rows]
    settings = actions.model_dump(mode="json", include={"space", "compose", "rest"})
    return hashlib.sha256(json.dumps([CACHE_VERSION, content, settings, fps]).encode()).hexdigest()


def find_version(file: str) -> tuple[str | int, ...] | None:
    try:
        return media_from_path(file).identity()
    except READ_ERRORS:
        return None


def read_all_actions(sources: Sequence[Sample], actions: ActionsRecipe, fps: float | None) -> list[Floats]:
    """Return one array [actions, components] for each episode or video. Unreadable ones are skipped and logged.

    Raises DataError if no actions can be read.
    """
    readable: list[Floats] = []
    skipped: list[str] = []
    with track_progress(sources, TITLE, total=len(sources)) as tracked:
        for sample in tracked:
            LIVENESS.record_progress(TITLE)
            try:
                found = read_clip_actions(sample, actions, fps)
            except READ_ERRORS as error:
                skipped.append(f"{sample.id}: {error}")
                continue
            if found.ndim == 2 and np.isfinite(found).all():
                readable.append(found)
            else:
                skipped.append(f"{sample.id}: NaN or infinite numbers, or not [N,D]")
    if not readable:
        raise DataError(
            f"data.actions.stats: the data has no actions. First error: {next(iter(skipped), 'no samples')}"
        )
    if skipped:
        log.warning("data.actions.stats: %d of %d skipped, e.g. %s", len(skipped), len(sources), skipped[0])
    return readable


def read_clip_actions(sample: Sample, actions: ActionsRecipe, fps: float | None) -> Floats:
    """Return all actions [number of actions, components] that clips of an episode or video can contain.

    fps: frame rate of the clips, or None for the recorded frame rate. Raises KeyError, OSError or ValueError.
    """
    step = 1.0
    if fps is not None:
        if not isinstance(sample.media, EpisodeVideo):
            raise ValueError("stats: data with data.fps needs data.kind: lerobot")
        step = max(step, sample.media.fps / fps)
    if sample.rows is None:
        return read_raw_input(sample, ACTIONS)
    space, rows = ActionSpace.from_recipe(actions), sample.rows
    length = space.count_frames(rows)
    starts = [np.arange(start, length - 0.5, step) for start in range(math.ceil(step))]
    clips = [np.ceil(moments - 0.5).astype(int).tolist() for moments in starts]  # the nearest frames, as in a clip
    return np.concatenate([space(rows, frames) for frames in clips if len(frames) > 1])
