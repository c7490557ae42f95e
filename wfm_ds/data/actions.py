"""Facts about the actions of a run, found once, before any model is loaded, and known to all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wfm_ds.data.inputs import READ_ERRORS, raw_input
from wfm_ds.data.npy import read_npy
from wfm_ds.data.samples import Sample
from wfm_ds.data.trajectories import ACTIONS, Floats, Scaling, scaling_of
from wfm_ds.errors import DataError
from wfm_ds.recipe.schema import Recipe

NUM_PROBED = 16  # samples whose actions say how wide those of the data set are


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """Width and scaling of the actions of the data, and actions that no clip has."""

    width: int  # numbers of an action
    scaling: Scaling | None = None
    library: Floats | None = None  # [N,F-1,D], scaled: rollout.trajectory_library


def actions_of(recipe: Recipe, samples: Sequence[Sample]) -> Actions | None:
    """Read the stats and the library of a recipe, and how wide the actions of its data are; None if data.inputs names
    no actions. Raises DataError for files that cannot be used."""
    if ACTIONS not in recipe.data.inputs:
        return None
    scaling = scaling_of(recipe.data.actions)
    width = recipe.data.actions.width or (len(scaling.low) if scaling else None) or widest_used(samples)
    if scaling is not None and width != len(scaling.low):
        raise DataError(f"data.actions.width {width}: data.actions.stats has {len(scaling.low)} numbers")
    found = None
    if recipe.is_rl and recipe.rl.rollout.trajectory_library is not None:
        path = Path(recipe.rl.rollout.trajectory_library)
        found = library(path, (recipe.sampling.num_frames - 1, width), scaling)
    return Actions(width=width, scaling=scaling, library=found)


def widest_used(samples: Sequence[Sample]) -> int:
    """Return how many numbers most of the first samples' actions have. Raises DataError where none can be read."""
    found: Counter[int] = Counter()
    for sample in samples[:NUM_PROBED]:
        try:
            raw = raw_input(sample, ACTIONS)
        except READ_ERRORS:
            continue
        if raw.ndim == 2:
            found[raw.shape[1]] += 1
    if not found:
        raise DataError(
            f"data.inputs: none of the first {min(len(samples), NUM_PROBED)} samples has actions [N-1,D] that can be "
            "read: name an .npy file as `actions` in each NAME.json"
        )
    return found.most_common(1)[0][0]


def library(path: Path, shape: tuple[int, int], scaling: Scaling | None) -> Floats:
    """Read a library of actions, an .npy file [N,F-1,D] of trajectories of this shape, scaled as those of the data are.
    Raises DataError."""
    try:
        with path.open("rb") as file:
            found = read_npy(file)
    except (OSError, ValueError) as error:
        raise DataError(f"rollout.trajectory_library: {path} cannot be read: {error}") from error
    if found.ndim != 3 or not len(found) or not np.isfinite(found).all():
        raise DataError(f"rollout.trajectory_library: {path} must hold finite numbers [N,F-1,D]")
    if found.shape[1:] != shape:
        raise DataError(
            f"rollout.trajectory_library: {path} has trajectories {list(found.shape[1:])}, and samples of this recipe "
            f"have {list(shape)}"
        )
    return found if scaling is None else scaling(found)
