"""Selection of the trackers named in a recipe, and check of their packages."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from wfm_ds.monitoring.tracking import RunInfo, Tracker, TrackerError, TrackerThread
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import flatten_keys

TRACKERS = {
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WeightsAndBiases"),
    "mlflow": ("mlflow", "MLflow"),
    "trackio": ("trackio", "Trackio"),
}
"""Package of each tracker, and the name of its class. The class is in the module named after the tracker."""


def require_trackers(recipe: Recipe) -> None:
    """Raise TrackerError if the package of one of the recipe's trackers is missing."""
    for name in recipe.logging.active_trackers:
        package, _ = TRACKERS[name]
        if find_spec(package) is None:
            raise TrackerError(
                f"logging.trackers names {name}, which is not installed: pip install 'wfm_ds[{name}]', or remove it"
            )


def open_trackers(recipe: Recipe, resumed_at: int | None) -> list[TrackerThread]:
    """Start the recipe's trackers.

    If one of them cannot be started, the trackers that were already started are closed and TrackerError is raised.
    """
    started: list[TrackerThread] = []
    settings = recipe.logging
    require_trackers(recipe)
    try:
        for name in settings.active_trackers:
            facts = RunInfo(
                output_dir=recipe.run.output_dir,
                name=settings.run_name or recipe.run.output_dir.resolve().name,
                project=settings.project,
                recipe=flatten_keys(recipe.model_dump(mode="json", exclude_none=True)),
                resumed_at=resumed_at,
                options={} if name == "tensorboard" else getattr(settings, name),
            )
            started.append(TrackerThread(create_tracker(name), facts))
    except TrackerError:
        for subscriber in started:
            subscriber.close("failed", {})
        raise
    return started


def create_tracker(name: str) -> Tracker:
    """Create the tracker of this name without starting it.

    Imports the tracker's module, but not the library that the tracker uses.
    """
    tracker: Tracker = getattr(importlib.import_module(f"wfm_ds.monitoring.trackers.{name}"), TRACKERS[name][1])()
    return tracker
