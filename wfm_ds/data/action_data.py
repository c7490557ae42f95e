"""Width (number of values per action) and scaling of a dataset's actions, and the action trajectories of an RL run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from wfm_ds.data.action_statistics import load_statistics, unique_sources
from wfm_ds.data.input_files import READ_ERRORS, read_actions
from wfm_ds.data.samples import Sample, dataset_name
from wfm_ds.data.trajectories import ACTIONS, ActionScaling, Floats, load_scaling, read_npy
from wfm_ds.errors import DataError
from wfm_ds.recipe.actions import ActionsRecipe, find_embodiment
from wfm_ds.recipe.data import DataRecipe
from wfm_ds.recipe.schema import Recipe
from wfm_ds.storage.filesystem import open_regular

NUM_PROBED = 16  # number of episodes or files read to find the width of the actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionData:
    """Number of values per action (width), scaling of the training actions, and optional trajectories for RL."""

    width: int  # numbers per action
    scaling: ActionScaling | None = None
    library: Floats | None = None  # rollout.trajectory_library, scaled: [trajectories, steps, width]
    sets: Mapping[str, ActionData] = field(default_factory=dict)  # one per data set of a mixture, if they differ


def load_action_data(recipe: Recipe, training: Sequence[Sample], held_out: Sequence[Sample]) -> ActionData | None:
    """Return the ActionData of a recipe. Returns None if data.inputs does not contain actions.

    Raises DataError if a file with actions cannot be used, or if the actions do not fit data.domain.
    """
    data, parts = recipe.data, dict[str, ActionData]()
    if ACTIONS not in data.inputs:
        return None
    for name, part in differing_sets(data).items():
        own, other = ([s for s in some if dataset_name(s) == name] for some in (training, held_out))
        parts[name] = describe_actions(part, data.fps, own, [*own, *other])
    if parts and recipe.validation.path is None:
        whole = next(iter(parts.values()))
    else:  # the samples of validation.path are in none of the data sets
        whole = describe_actions(data, data.fps, training, held_out if parts else [*training, *held_out])
    trajectories = None
    if recipe.is_rl and recipe.rl.rollout.trajectory_library is not None:
        if parts:
            raise DataError("rollout.trajectory_library: data.sets have different actions: remove it")
        path = Path(recipe.rl.rollout.trajectory_library)
        shape, can_be_longer = (recipe.sampling.num_frames - 1, whole.width), recipe.rl.rollout.history.clips > 0
        trajectories = load_trajectory_library(path, shape, whole.scaling, can_be_longer=can_be_longer)
    return ActionData(width=whole.width, scaling=whole.scaling, library=trajectories, sets=parts)


def differing_sets(data: DataRecipe) -> dict[str, DataRecipe]:
    """Return {name: recipe} of a mixture's data sets, or {} if all of them have the same actions and domain."""
    parts = {name: part for name, (part, _) in data.set_recipes().items() if ACTIONS in part.inputs}
    shared = (data.actions, data.domain)
    if data.actions.stats != "data" and all((part.actions, part.domain) == shared for part in parts.values()):
        return {}
    return parts


def add_viewpoints(samples: Sequence[Sample], data: DataRecipe) -> list[Sample]:
    by_set = {name: part.viewpoint for name, (part, _) in data.set_recipes().items()}
    if data.viewpoint is None and not any(by_set.values()):
        return list(samples)
    viewpoints = [by_set.get(dataset_name(sample), data.viewpoint) for sample in samples]
    return [
        replace(sample, prompt=replace(sample.prompt, viewpoint=viewpoint))
        for sample, viewpoint in zip(samples, viewpoints, strict=True)
    ]


def describe_actions(
    data: DataRecipe, fps: float | None, training: Sequence[Sample], probed: Sequence[Sample]
) -> ActionData:
    """Return the width (number of values per action) and scaling of the actions of a data set.

    fps: frame rate of the clips (data.fps). training: samples that determine the scaling. probed: samples that
    determine the width. Raises DataError if the actions cannot be used or do not fit data.domain.
    """
    actions = data.actions
    stats = load_statistics(training, actions, fps, data.cache_dir) if actions.stats == "data" else None
    scaling = load_scaling(actions, stats)
    width = actions.width or (len(scaling.low) if scaling else None)
    width = width or probe_action_width(actions, probed)
    if scaling is not None and width != len(scaling.low):
        raise DataError(f"data.actions.width {width} does not match data.actions.stats with {len(scaling.low)} numbers")
    robot = None if data.domain is None else find_embodiment(data.domain)
    if robot is not None and robot.width not in (None, width):
        fix = f"set data.actions.space: {robot.space}" if robot.space else f"use actions of {robot.width} numbers"
        raise DataError(f"data.domain {data.domain}: {width} numbers per action, the robot has {robot.width}: {fix}")
    return ActionData(width=width, scaling=scaling)


def probe_action_width(actions: ActionsRecipe, samples: Sequence[Sample]) -> int:
    """Return the most common number of values per action in NUM_PROBED evenly spaced episodes or files of the dataset.

    Raises DataError if none of these samples has actions [steps, values per action].
    """
    widths: Counter[int] = Counter()
    reasons: list[str] = []
    sources = unique_sources(samples)
    count = min(len(sources), NUM_PROBED)
    for sample in (sources[i * len(sources) // count] for i in range(count)):
        try:
            raw = read_actions(sample, actions)
        except READ_ERRORS as error:
            reasons.append(f"{sample.id}: {error}")
            continue
        if raw.ndim == 2:
            widths[raw.shape[1]] += 1
    if not widths:
        raise DataError(
            f"data.inputs: none of {count} samples has readable actions [N-1,D] "
            f"({next(iter(reasons), 'other shapes')}). Set `actions` in each NAME.json to an .npy file"
            if not samples or samples[0].rows is None
            else f"data.actions.space: the episodes have no readable actions ({next(iter(reasons))})"
        )
    return widths.most_common(1)[0][0]


def load_trajectory_library(
    path: Path, shape: tuple[int, int], scaling: ActionScaling | None, *, can_be_longer: bool = False
) -> Floats:
    """Load action trajectories from an .npy file and scale them like the training actions.

    Returns float32 [trajectories, steps, numbers per action].

    shape: required (steps, numbers per action). A clip of F frames has F-1 steps. can_be_longer: also accept
    trajectories with more steps. Raises DataError if the file is unreadable, has a different shape or contains
    non-finite numbers.
    """
    try:
        with open_regular(path) as file:
            trajectories = read_npy(file)
    except (OSError, ValueError) as error:
        raise DataError(f"rollout.trajectory_library: {path} cannot be read: {error}") from error
    if trajectories.ndim != 3 or not len(trajectories) or not np.isfinite(trajectories).all():
        raise DataError(f"rollout.trajectory_library: {path} must contain finite numbers [N,F-1,D]")
    num_steps, width = trajectories.shape[1:]
    if (num_steps, width) != shape and not (can_be_longer and width == shape[1] and num_steps > shape[0]):
        raise DataError(
            f"rollout.trajectory_library: {path} has trajectories of shape {list(trajectories.shape[1:])}, this recipe "
            f"needs {list(shape)}"
        )
    return trajectories if scaling is None else scaling(trajectories)
