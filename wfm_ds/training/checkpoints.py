"""When checkpoints are saved, and how a run resumes. store.py manages the folders, state.py their content."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from wfm_ds.checkpoint import store
from wfm_ds.checkpoint.state import capture, read_state
from wfm_ds.checkpoint.store import Save
from wfm_ds.run.job import CommonJob
from wfm_ds.run.layout import CHECKPOINTS
from wfm_ds.training.outcome import Agreed

log = logging.getLogger(__name__)


class Resumable(Protocol):
    """A training loop, as seen by its checkpoints."""

    step: int  # the last completed step

    def state(self) -> dict[str, Any]:
        """Return the JSON state needed to resume, except the engine's. Identical on every rank. Collective."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        ...


class Checkpoints:
    """Writes `checkpoints/step_<N>/` at the recipe's interval and when the run stops. All methods are collective."""

    def __init__(self, job: CommonJob) -> None:
        self.job, self.settings = job, job.recipe.checkpoint
        self.root = job.recipe.run.output_dir / CHECKPOINTS
        self._saved_at: int | None = None  # step of the last started save
        self._saving: Save | None = None

    def restore(self, loop: Resumable, source: Path) -> None:
        """Restore engine and loop from this checkpoint. Call before the first step."""
        checkpoint = store.read(source)
        assert checkpoint is not None, "it was complete a moment ago"
        loop.restore(read_state(self.job.engine, source, checkpoint.world_size))
        if source.parent == self.root:  # not for a checkpoint of another run
            self._saved_at = loop.step
        self.job.monitor.message(f"continues after step {loop.step} from {source}")

    @property
    def is_writing(self) -> bool:
        """Return whether a thread of this rank is still writing its shard of the last checkpoint."""
        return self._saving is not None and not self._saving.share_is_written()

    def after_step(self, loop: Resumable, agreed: Agreed) -> None:
        """Save if scheduled by the recipe or requested by SIGUSR1.

        Call after the metrics of the step are written, because the checkpoint includes them. Blocks only until the
        state is on the host. A thread writes it to disk, and a later step completes the checkpoint.
        """
        if not agreed.writing:
            self.finish()
        every, step = self.settings.every, loop.step
        is_scheduled = every > 0 and (step % every == 0 or step == self.job.recipe.run.steps)
        if is_scheduled or agreed.save:
            self._begin(loop)

    def at_stop(self, loop: Resumable) -> None:
        """Save regardless of the interval, and wait until the checkpoint is complete."""
        if self._saved_at != loop.step:
            self._begin(loop)
        self.finish()

    def finish(self) -> None:
        """Wait for the pending save, if any, and complete it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with self.job.timer("checkpoint"):
                log.info("saved %s", saving.commit())
            if self.job.mirror is not None:
                self.job.mirror.wake()

    def _begin(self, loop: Resumable) -> None:
        self.finish()
        job = self.job
        with job.timer("checkpoint"):
            state = capture(job.engine, loop.state(), job.export_note, job.dtype)
            facts = {
                "metrics_bytes": job.monitor.sync(),
                "samples_per_step": job.derived.samples_per_step,
                "accumulation": job.derived.accumulation,
                "sequence_parallel": job.derived.sequence_parallel,
                "num_experts": job.num_experts,
            }
            self._saving = Save(
                self.root,
                loop.step,
                job.world,
                state.write,
                facts=facts,
                keep=self.settings.keep,
                spared=tuple if job.mirror is None else job.mirror.unverified,
            )
        self._saved_at = loop.step
