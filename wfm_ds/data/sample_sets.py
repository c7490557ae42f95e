"""Scan the data of any kind, and check that it suits the algorithm."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wfm_ds.data.action_data import add_viewpoints
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.data.folder import load_folder, load_layout
from wfm_ds.data.lerobot import LeRobotSet
from wfm_ds.data.media_inputs import MediaInputs
from wfm_ds.data.preference_pairs import load_pairs
from wfm_ds.data.samples import REASONS, SampleSet, SampleSetMixture
from wfm_ds.errors import DataError
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.shared_defaults import user_cache_folder
from wfm_ds.user_class import import_class

log = logging.getLogger(__name__)


def scan_paths(data: DataRecipe, paths: Sequence[str], *, pairs: bool) -> SampleSet:
    """Scan the data at these paths and log the rejected entries. Several paths are allowed only for tar shards.

    pairs: whether the algorithm trains on preference pairs. Raises DataError if the data is invalid or unsuitable.
    """
    dataset = build_sample_set(data, paths)
    dataset.samples = add_viewpoints(dataset.samples, data)
    mismatch = next((sample for sample in dataset.samples if (sample.rejected is not None) != pairs), None)
    if mismatch is not None:
        wanted = "a pair: set `rejected`" if pairs else "a single image or video: omit `rejected`"
        raise DataError(f"{dataset.source}: this algorithm needs {mismatch.id} to be {wanted}")
    return log_scan_result(dataset)


def log_scan_result(dataset: SampleSet) -> SampleSet:
    for note in dataset.notes:
        log.warning("%s: %s", dataset.source, note)
    for reason, names in dataset.bad.items():
        log.warning("%s: %d skipped, %s, e.g. %s", dataset.source, len(names), REASONS[reason], names[0])
    return dataset


def build_sample_set(data: DataRecipe, paths: Sequence[str]) -> SampleSet:
    if data.is_user_kind:
        return build_user_sample_set(data, paths)
    inputs = MediaInputs.from_recipe(data, Path(paths[0]))
    if data.kind == "pairs":
        return load_pairs(paths, cache_dir=data.cache_dir, max_bad_fraction=data.max_bad_fraction, inputs=inputs)
    if data.kind == "sets":
        return SampleSetMixture(
            {
                name: (build_sample_set(part, part.shard_patterns), weight)
                for name, (part, weight) in data.set_recipes().items()
            }
        )
    if data.kind == "lerobot":
        return LeRobotSet(data, paths[0])
    if data.kind == "folder":
        (path,) = paths
        return load_folder(data, Path(path))
    if data.kind == "paired":
        cache_dir = data.cache_dir or user_cache_folder()
        return CaptionedFolder(
            Path(paths[0]), max_bad_fraction=data.max_bad_fraction, cache_dir=cache_dir, inputs=inputs
        )
    return load_layout(data, data.kind, paths, inputs)


def build_user_sample_set(data: DataRecipe, paths: Sequence[str]) -> SampleSet:
    key = "data.kind"
    make: Callable[..., SampleSet] = import_class(data.kind, SampleSet, key=key, error=DataError)
    arguments: dict[str, Any] = {"max_bad_fraction": data.max_bad_fraction, **data.options}
    try:
        inspect.signature(make).bind(list(paths), **arguments)
    except TypeError as error:
        raise DataError(f"{key} {data.kind}: data.options do not fit its constructor: {error}") from error
    try:
        dataset: SampleSet = make(list(paths), **arguments)
    except OSError as error:
        raise DataError(f"{key} {data.kind}: {', '.join(paths)} cannot be read: {error}") from error
    dataset.samples.sort(key=lambda sample: sample.id)
    ids = [sample.id for sample in dataset.samples]
    if duplicate := next((current for current, following in itertools.pairwise(ids) if current == following), None):
        raise DataError(f"{key} {data.kind}: two samples have the id {duplicate}; ids must be unique")
    if unknown := sorted(dataset.bad.keys() - REASONS.keys()):
        raise DataError(
            f"{key} {data.kind}: unknown reject reasons {', '.join(unknown)}; valid are {', '.join(REASONS)}"
        )
    return dataset
