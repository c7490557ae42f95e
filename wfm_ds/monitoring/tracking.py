"""Experiment trackers, which show a run's numbers and samples in other programs. Each runs in its own thread.

A run never waits for a tracker and never fails because of one. A tracker that raises an exception is dropped with one
warning. A slow tracker loses samples but no numbers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from wfm_ds.errors import UserError
from wfm_ds.monitoring.samples import GeneratedSample

log = logging.getLogger(__name__)

TRACKERS_FOLDER = "trackers"  # folder in the run's folder for local files of trackers
WANDB_ID, MLFLOW_ID, TRACKIO_ID, SWANLAB_ID = "wandb_id", "mlflow_run", "trackio_run", "swanlab_id"
RUN_ID_FILES = tuple(f"{TRACKERS_FOLDER}/{name}" for name in (WANDB_ID, MLFLOW_ID, TRACKIO_ID, SWANLAB_ID))
"""Files in the run's folder with the run's id in each tracker. Checkpoints contain copies of them."""
START_S, FINISH_S = 90.0, 30.0
MAX_QUEUED_SAMPLES = 4  # evaluations with samples queued for a slow tracker; their images are in memory


class TrackerError(UserError):
    """Raised if a tracker cannot be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Information about a run for its trackers."""

    output_dir: Path
    name: str
    project: str
    recipe: Mapping[str, Any] = field(default_factory=dict)  # by dotted key
    resumed_at: int | None = None  # last step that is still valid in the tracker; None for a new run
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the tracker's library, from the recipe

    @property
    def folder(self) -> Path:
        """Folder for the local files of trackers, created at first use."""
        folder = self.output_dir / TRACKERS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def load_or_create(self, name: str, create: Callable[[], str]) -> str:
        """Return the text of the file `name` in `folder`. For a new run or file, first write `create()` to it."""
        path = self.folder / name
        if self.resumed_at is None or not path.is_file():
            path.write_text(create(), encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def forget(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


class Tracker(Protocol):
    """Interface of a tracker. All methods are called in one thread, `start` first and `finish` last."""

    name: str

    def start(self, run: RunInfo) -> None:
        """Start the tracker. Raises TrackerError, or an error of its library, if that fails."""
        ...

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite metrics {tag: value} of an optimizer step. May be called several times per step."""
        ...

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        """Log generated samples, grouped by prompt."""
        ...

    def finish(self, status: str, summary: Mapping[str, float]) -> None:
        """End the run with a status (finished, preempted or failed) and its final metrics."""
        ...


class TrackerThread:
    """Runs a tracker in a separate thread."""

    def __init__(self, tracker: Tracker, run: RunInfo) -> None:
        """Start the tracker. Raises TrackerError if it fails or takes longer than START_S seconds."""
        self._tracker, self._run = tracker, run
        self._events: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._started, self._start_error = threading.Event(), ""
        self._closed = self._dropped = self._warned = False
        self._thread = threading.Thread(target=self._process_events, name=tracker.name, daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise TrackerError(f"logging.trackers: {tracker.name} did not start within {START_S:.0f} s: remove it")
        if self._start_error:
            raise TrackerError(f"logging.trackers: {tracker.name} cannot start ({self._start_error}): fix or remove it")

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._enqueue_event("scalars", lambda: self._tracker.log_scalars(step, values))

    def log_samples(self, step: int, tag: str, samples: Sequence[GeneratedSample]) -> None:
        with self._changed:
            is_behind = sum(kind == "samples" for kind, _ in self._events) >= MAX_QUEUED_SAMPLES
        if not is_behind:
            self._enqueue_event("samples", lambda: self._tracker.log_samples(step, tag, samples))
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s is too slow: samples of step %d and perhaps later ones are not shown there", self.name, step
            )

    def close(self, status: str, summary: Mapping[str, float]) -> None:
        """Send the run's outcome to the tracker, and wait at most FINISH_S seconds until it finishes."""
        self._enqueue_event("finish", lambda: self._tracker.finish(status, summary))
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            log.warning("%s did not finish within %.0f s; the run ends without it", self.name, FINISH_S)

    @property
    def name(self) -> str:
        return self._tracker.name

    def _enqueue_event(self, kind: str, event: Callable[[], None]) -> None:
        with self._changed:
            if not self._dropped:
                self._events.append((kind, event))
                self._changed.notify()

    def _process_events(self) -> None:
        try:
            self._tracker.start(self._run)
        except Exception as error:  # noqa: BLE001  (an error of the library; the constructor reports it)
            self._start_error = " ".join(str(error).split())[:300] or type(error).__name__
            return
        finally:
            self._started.set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closed)
                if not self._events:
                    return
                _, event = self._events.popleft()
            try:
                event()
            except Exception as error:  # noqa: BLE001  (an error of a tracker must not end the run)
                with self._changed:
                    self._dropped = True
                    self._events.clear()
                reason = " ".join(str(error).split())[:300]
                log.warning("%s is dropped (%s: %s); the run continues", self.name, type(error).__name__, reason)
                return
