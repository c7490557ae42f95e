"""MLflow tracker. It logs to MLFLOW_TRACKING_URI if that is set, otherwise to a SQLite file in the run's folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wfm_ds.chunks import split_into_chunks
from wfm_ds.monitoring.images import reduce_image
from wfm_ds.monitoring.samples import GeneratedSample, sample_grid, sample_table
from wfm_ds.monitoring.tracking import RunInfo

MAX_PARAMS, MAX_CHARACTERS = 100, 6000  # parameters per call; characters per parameter value
RUN_STATUSES = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class MLflow:
    """Logs numbers as metrics, sample grids and tables as artifacts, and the recipe as parameters and a file."""

    name = "mlflow"

    def start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)  # they log the creation of tables
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder.absolute() / 'mlflow.db'}"
        options = {"tracking_uri": uri, **run.options}
        self._client: Any = MlflowClient(options["tracking_uri"])
        self._id = run.load_or_create("mlflow_run", lambda: self._create_run(run, is_here=uri.startswith("sqlite")))
        self._client.update_run(self._id, status="RUNNING")

    def _create_run(self, run: RunInfo, *, is_here: bool) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        artifacts = (run.folder / "mlflow").absolute().as_uri() if is_here else None
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, artifacts)
        run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        values = [Param(key, str(value)[:MAX_CHARACTERS]) for key, value in run.recipe.items()]
        for part in split_into_chunks(values, MAX_PARAMS):
            self._client.log_batch(run_id, params=list(part))
        recipe = run.output_dir / "recipe.yaml"
        if recipe.is_file():
            self._client.log_artifact(run_id, str(recipe))
        return run_id

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(tag, value, now_ms, step) for tag, value in values.items()])

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        name = f"{tag}/step_{step:06d}"
        self._client.log_image(self._id, reduce_image(sample_grid(samples), 2048), artifact_file=f"{name}.png")
        self._client.log_text(self._id, sample_table(samples), f"{name}.md")

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        self._client.set_terminated(self._id, RUN_STATUSES[status])
