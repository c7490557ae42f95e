"""Broadcast of a scanned dataset from rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from wfm_ds.data.action_data import ActionData
from wfm_ds.data.datasets import TrainingData
from wfm_ds.data.episode import CameraSpan, EpisodeVideo
from wfm_ds.data.episode_rows import EpisodeRows
from wfm_ds.data.hf_dataset import HfColumn, HfMedia
from wfm_ds.data.samples import LocalFile, Media, Sample, pack_prompt, unpack_prompt
from wfm_ds.data.trajectories import ActionScaling
from wfm_ds.data.webdataset import IndexEntry, TarMember
from wfm_ds.distributed.world import World
from wfm_ds.transport.arrays import pack_arrays, unpack_arrays


class _UserMediaError(Exception):
    """Raised for a sample with a user-defined media class, which cannot be sent to other ranks."""


def read_on_main(world: World, read: Callable[[], TrainingData]) -> TrainingData:
    """Call `read` on rank 0 and return its result on every rank. All ranks must call this.

    If a sample has a user-defined media class, every rank calls `read`. If `read` raises UserError on rank 0, all ranks
    raise it.
    """
    results = list[TrainingData]()
    world.run_without_timeout(lambda: results.append(read()))
    packed = world.broadcast(pack_data(results[0]) if results and world.size > 1 else None)
    if world.is_main and (packed is not None or world.size == 1):
        return results[0]
    if packed is None:  # identical on every rank
        data: TrainingData = world.run_checked(lambda: results[0] if results else read())
        return data
    return unpack_data(packed)


def pack_data(data: TrainingData) -> dict[str, Any] | None:
    """Return the data as JSON values. Returns None if a sample has a user-defined media class."""
    versions: dict[str, Any] = {}
    try:
        samples, held_out = ([_pack_sample(s, versions) for s in part] for part in (data.samples, data.held_out))
    except _UserMediaError:
        return None
    # If the prompts are the samples' prompts, send them only once.
    prompts_from_samples = len(data.prompts) == len(data.samples) and all(
        prompt is sample.prompt for prompt, sample in zip(data.prompts, data.samples, strict=True)
    )
    return {
        "samples": samples,
        "held_out": held_out,
        "prompts": None if prompts_from_samples else [pack_prompt(prompt) for prompt in data.prompts],
        "shown": [pack_prompt(prompt) for prompt in data.validation_prompts],
        "bad": {reason: list(names) for reason, names in data.bad.items()},
        "versions": versions,
        "actions": None if data.actions is None else _pack_actions(data.actions),
    }


def unpack_data(packed: dict[str, Any]) -> TrainingData:
    versions = {key: _unpack_version(version) for key, version in packed["versions"].items()}
    samples, held_out = ([_unpack_sample(row, versions) for row in packed[part]] for part in ("samples", "held_out"))
    prompts = packed["prompts"]
    return TrainingData(
        samples=samples,
        held_out=held_out,
        prompts=[sample.prompt for sample in samples] if prompts is None else [unpack_prompt(p) for p in prompts],
        validation_prompts=[unpack_prompt(prompt) for prompt in packed["shown"]],
        bad=packed["bad"],
        actions=None if packed["actions"] is None else _unpack_actions(packed["actions"]),
    )


def _pack_actions(actions: ActionData) -> list[Any]:
    scaling, library = actions.scaling, {} if actions.library is None else {"library": actions.library}
    scales = None if scaling is None else [scaling.low.tolist(), scaling.scale.tolist(), scaling.offset]
    return [
        actions.width,
        scales,
        pack_arrays(library),
        {name: _pack_actions(one) for name, one in actions.sets.items()},
    ]


def _unpack_actions(packed: Sequence[Any]) -> ActionData:
    width, scales, library, sets = packed
    scaling = None
    if scales is not None:
        low, spread, offset = scales
        scaling = ActionScaling(np.asarray(low, np.float64), np.asarray(spread, np.float64), offset)
    parts = {name: _unpack_actions(one) for name, one in sets.items()}
    return ActionData(width=width, scaling=scaling, library=unpack_arrays(library).get("library"), sets=parts)


def _pack_sample(sample: Sample, versions: dict[str, Any]) -> list[Any]:
    embedding = None if sample.embedding is None else str(sample.embedding)
    media = [_pack_media(item, versions) for item in sample.all_media]
    files = {name: _pack_media(file, versions) for name, file in sample.files.items()}
    images = {name: _pack_media(file, versions) for name, file in sample.images.items()}
    rows = None
    if sample.rows is not None:
        if not isinstance(sample.rows, EpisodeRows):
            raise _UserMediaError
        rows = f"rows {id(sample.rows)}"  # shared by the windows of an episode
        versions.setdefault(rows, asdict(sample.rows))
    return [sample.id, media, pack_prompt(sample.prompt), embedding, files, images, list(sample.texts), rows]


def _pack_media(media: Media, versions: dict[str, Any]) -> Any:
    if isinstance(media, LocalFile):
        return os.fspath(media.file)
    if isinstance(media, HfMedia):
        key = f"{media.column.name} of {media.column.files[0]}"
        versions[key] = [media.column.name, *media.column.files]
        return [key, media.row, media.suffix]
    if isinstance(media, EpisodeVideo):
        key = f"views {id(media.views)}"
        versions.setdefault(key, {"views": [[asdict(camera) for camera in row] for row in media.views]})
        return {"name": media.name, "views": key, "fps": media.fps, "first": media.first, "length": media.length}
    if isinstance(media, TarMember):
        versions[media.shard] = list(media.version)
        return [media.shard, asdict(media.member)]
    raise _UserMediaError


def _unpack_sample(row: Sequence[Any], versions: dict[str, Any]) -> Sample:
    sample_id, packed, prompt, embedding, files, images, texts, rows = row
    media, *rejected = (_unpack_media(item, versions) for item in packed)
    path = None if embedding is None else Path(embedding)
    return Sample(
        id=sample_id,
        media=media,
        prompt=unpack_prompt(prompt),
        embedding=path,
        rejected=rejected[0] if rejected else None,
        files={name: _unpack_media(file, versions) for name, file in files.items()},
        images={name: _unpack_media(file, versions) for name, file in images.items()},
        texts=tuple(texts),
        rows=None if rows is None else versions[rows],
    )


def _unpack_version(version: Any) -> Any:
    if isinstance(version, list):
        return tuple(version)
    if "views" in version:
        return tuple(tuple(CameraSpan(**camera) for camera in row) for row in version["views"])
    return EpisodeRows(**version)


def _unpack_media(packed: Any, versions: dict[str, Any]) -> Media:
    if isinstance(packed, str):
        return LocalFile(packed)
    if isinstance(packed, dict):
        return EpisodeVideo(**(packed | {"views": versions[packed["views"]]}))
    if len(packed) == 3:
        key, row, suffix = packed
        column, *files = map(str, versions[key])
        return HfMedia(HfColumn(tuple(files), column), row, suffix)
    shard, member = packed
    return TarMember(shard, versions[shard], IndexEntry(**member))
