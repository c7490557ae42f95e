"""Saves checkpoints on schedule and resumes runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from wfm_ds.checkpoint import store
from wfm_ds.checkpoint.sharded_states import capture_state, restore_state
from wfm_ds.checkpoint.store import CheckpointSave
from wfm_ds.distributed.progress import show_wait
from wfm_ds.runs.job import CommonJob
from wfm_ds.runs.layout import CHECKPOINTS

log = logging.getLogger(__name__)


class Resumable(Protocol):
    """Interface of a training loop that can be saved and resumed."""

    step: int  # the last completed step

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state as JSON values, identical on every rank. All ranks must call this."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """Writes `checkpoints/step_<N>/` at the recipe's interval and when the run stops.

    All ranks must call every method.
    """

    def __init__(self, job: CommonJob) -> None:
        self.job, self.settings = job, job.recipe.checkpoint
        self.root = job.recipe.run.output_dir / CHECKPOINTS
        self._last_saved_step: int | None = None  # step of the last started save
        self._saving: CheckpointSave | None = None

    def restore_run(self, loop: Resumable, source: Path) -> None:
        """Restore the engine and `loop` from the checkpoint folder `source`. Call before the first step."""
        checkpoint = store.read_checkpoint(source)
        assert checkpoint is not None, "it was complete a moment ago"
        loop.load_state_dict(restore_state(self.job.engine, source, checkpoint.world_size))
        if source.parent == self.root:  # not for a checkpoint of another run
            self._last_saved_step = loop.step
        self.job.monitor.log_message(f"continues after step {loop.step} from {source}")

    @property
    def is_writing(self) -> bool:
        """Return whether this rank is still writing its shard of the last checkpoint to disk."""
        return self._saving is not None and not self._saving.is_share_written()

    def after_step(self, loop: Resumable, *, save: bool, writing: bool) -> None:
        """Save a checkpoint if the recipe schedules one for this step, or if `save` is True.

        writing: whether any rank is still writing its shard of the last checkpoint.

        Call this after the step's metrics are written, because the checkpoint records the size of metrics.jsonl. A
        later call completes the checkpoint.
        """
        if not writing:
            self.wait_for_save()
        every, step = self.settings.every, loop.step
        is_scheduled = every > 0 and (step % every == 0 or step == self.job.recipe.run.steps)
        if is_scheduled or save:
            self._start_save(loop)

    def save_at_stop(self, loop: Resumable) -> None:
        """Wait until a checkpoint of the last step is complete. Starts the save if necessary."""
        if self._last_saved_step != loop.step:
            self._start_save(loop)
        self.wait_for_save()

    def wait_for_save(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            with self.job.timer("checkpoint"), show_wait("saving the checkpoint"):
                log.info("saved %s", saving.commit())
            if self.job.mirror is not None:
                self.job.mirror.wake()

    def _start_save(self, loop: Resumable) -> None:
        self.wait_for_save()
        job = self.job
        with job.timer("checkpoint"):
            state = capture_state(job.engine, loop.state_dict(), job.export_spec, job.dtype)
            facts = {
                "metrics_bytes": job.monitor.sync_metrics(),
                "samples_per_step": job.run_sizes.samples_per_step,
                "accumulation": job.run_sizes.accumulation,
                "sequence_parallel": job.run_sizes.sequence_parallel,
                "num_experts": job.num_experts,
            }
            self._saving = CheckpointSave(
                self.root,
                loop.step,
                job.world,
                state.write_files,
                metadata=facts,
                keep=self.settings.keep,
                protected_steps=tuple if job.mirror is None else job.mirror.list_unverified_steps,
            )
        self._last_saved_step = loop.step
