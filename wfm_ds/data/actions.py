"""Load the action width, the action scaling and the additional action trajectories of a run, before the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wfm_ds.data.inputs import READ_ERRORS, read_raw_input
from wfm_ds.data.npy import read_npy
from wfm_ds.data.samples import Sample
from wfm_ds.data.trajectories import ACTIONS, ActionScaling, Floats, load_scaling
from wfm_ds.errors import DataError
from wfm_ds.recipe.schema import Recipe

NUM_PROBED = 16  # number of samples read to find the width of the actions


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionData:
    """Width and scaling of the actions in the training data, and optional additional action trajectories for RL."""

    width: int  # numbers per action
    scaling: ActionScaling | None = None
    library: Floats | None = None  # [N,F-1,D], scaled; from rollout.trajectory_library


def load_action_data(recipe: Recipe, samples: Sequence[Sample]) -> ActionData | None:
    """Return the ActionData of a recipe. Returns None if data.inputs does not contain actions.

    Raises DataError if a file with actions cannot be used.
    """
    if ACTIONS not in recipe.data.inputs:
        return None
    scaling = load_scaling(recipe.data.actions)
    width = recipe.data.actions.width or (len(scaling.low) if scaling else None) or probe_action_width(samples)
    if scaling is not None and width != len(scaling.low):
        raise DataError(f"data.actions.width {width} does not match data.actions.stats with {len(scaling.low)} numbers")
    trajectories = None
    if recipe.is_rl and recipe.rl.rollout.trajectory_library is not None:
        path = Path(recipe.rl.rollout.trajectory_library)
        trajectories = load_trajectory_library(path, (recipe.sampling.num_frames - 1, width), scaling)
    return ActionData(width=width, scaling=scaling, library=trajectories)


def probe_action_width(samples: Sequence[Sample]) -> int:
    """Return the most common action width D in the first samples of the dataset.

    Raises DataError if none of these samples has actions [N-1 steps, D].
    """
    widths: Counter[int] = Counter()
    for sample in samples[:NUM_PROBED]:
        try:
            raw = read_raw_input(sample, ACTIONS)
        except READ_ERRORS:
            continue
        if raw.ndim == 2:
            widths[raw.shape[1]] += 1
    if not widths:
        raise DataError(
            f"data.inputs: none of the first {min(len(samples), NUM_PROBED)} samples has readable actions [N-1,D]. "
            "Set `actions` in each NAME.json to an .npy file"
        )
    return widths.most_common(1)[0][0]


def load_trajectory_library(path: Path, shape: tuple[int, int], scaling: ActionScaling | None) -> Floats:
    """Load action trajectories, float32 [N trajectories, F-1 steps, D], from an .npy file.

    The trajectories are scaled like the training actions. shape: the required shape (F-1, D) of a trajectory, for clips
    of F frames. Raises DataError if the file is unreadable, has a different shape or contains non-finite numbers.
    """
    try:
        with path.open("rb") as file:
            trajectories = read_npy(file)
    except (OSError, ValueError) as error:
        raise DataError(f"rollout.trajectory_library: {path} cannot be read: {error}") from error
    if trajectories.ndim != 3 or not len(trajectories) or not np.isfinite(trajectories).all():
        raise DataError(f"rollout.trajectory_library: {path} must contain finite numbers [N,F-1,D]")
    if trajectories.shape[1:] != shape:
        raise DataError(
            f"rollout.trajectory_library: {path} has trajectories of shape {list(trajectories.shape[1:])}, this recipe "
            f"needs {list(shape)}"
        )
    return trajectories if scaling is None else scaling(trajectories)
