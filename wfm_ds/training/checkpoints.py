"""Saving of a run at its times, and continuing it. The folders are store.py's, their content state.py's."""

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
    """Interface of a training loop for its checkpoints."""

    step: int  # the last one done

    def state(self) -> dict[str, Any]:
        """Everything that the next step and its metrics depend on besides the engine, as JSON; the same on every rank.
        All ranks call it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        ...


class Checkpoints:
    """Writes `checkpoints/step_<N>/` at the recipe's interval and when the run is stopped. Every rank calls all."""

    def __init__(self, job: CommonJob) -> None:
        self.job, self.settings = job, job.recipe.checkpoint
        self.root = job.recipe.run.output_dir / CHECKPOINTS
        self._saved_at: int | None = None  # the step of the last save that was begun
        self._saving: Save | None = None

    def restore(self, loop: Resumable, source: Path) -> None:
        """Restore engine and loop as they were in this checkpoint, before the first step."""
        found = store.read(source)
        assert found is not None, "it was complete a moment ago"
        loop.restore(read_state(self.job.engine, source, found.world_size))
        if source.parent == self.root:  # a run that began from another's checkpoint has none of its own yet
            self._saved_at = loop.step
        self.job.monitor.message(f"continues after step {loop.step} from {source}")

    @property
    def is_writing(self) -> bool:
        """Tell if a thread of this rank still writes its share of the last checkpoint."""
        return self._saving is not None and not self._saving.share_is_written()

    def after_step(self, loop: Resumable, agreed: Agreed) -> None:
        """Save, when the recipe says so or SIGUSR1 did. After the step's metrics are written: they belong to the
        checkpoint.

        The step waits only until its state is on the host; a thread writes it, and a later step finds it written.
        """
        if not agreed.writing:
            self.finish()
        every, step = self.settings.every, loop.step
        due = every > 0 and (step % every == 0 or step == self.job.recipe.run.steps)
        if due or agreed.save:
            self._begin(loop)

    def at_stop(self, loop: Resumable) -> None:
        """Save, whatever the interval, and wait for it."""
        if self._saved_at != loop.step:
            self._begin(loop)
        self.finish()

    def finish(self) -> None:
        """Wait until the save that is under way is complete, if there is one."""
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
