"""Trackio tracker: a SQLite file, by default in the run's folder. View it with `TRACKIO_DIR=... trackio show`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from wfm_ds.monitoring.images import reduce_image
from wfm_ds.monitoring.samples import GeneratedSample, sample_grid
from wfm_ds.monitoring.tracking import RunInfo

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "TRACKIO_DIR"  # folder of its files; read by trackio at import


class Trackio:
    """Logs numbers as metrics, the sample grid as an image, and the recipe as config."""

    name = "trackio"

    def start(self, run: RunInfo) -> None:
        os.environ.setdefault(FOLDER_VARIABLE, str((run.folder / "trackio").absolute()))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints instructions for its dashboard
            import trackio

            name = run.load_or_create("trackio_run", lambda: f"{run.name}-{uuid.uuid4().hex[:6]}")
            settings = {
                "project": run.project,
                "name": name,
                "config": dict(run.recipe),
                "resume": "allow",
                **run.options,
            }
            self._trackio, self._run = trackio, trackio.init(**settings)
        log.info("trackio: open the run with %s=%s trackio show", FOLDER_VARIABLE, os.environ[FOLDER_VARIABLE])

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        grid: Any = self._trackio.Image(reduce_image(sample_grid(samples), 2048), caption=samples[0].prompt)
        self._run.log({tag: grid}, step=step)

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
