"""Exports weights on schedule and pushes them to the Hub."""

from __future__ import annotations

import logging
from pathlib import Path

from wfm_ds.distributed.heartbeat import is_communication_error
from wfm_ds.distributed.progress import show_wait
from wfm_ds.errors import GatherError, RunError, UserError, describe_error, is_out_of_memory
from wfm_ds.runs.hub_push import HubPush
from wfm_ds.runs.job import CommonJob
from wfm_ds.runs.layout import EXPORTS

log = logging.getLogger(__name__)


class Exporter:
    """Exports weights to `safetensors/step_<N>/` on schedule and at the end of the run.

    All ranks must call every method.
    """

    def __init__(self, job: CommonJob) -> None:
        self.job = job
        self._last_export: tuple[int, Path] | None = None
        self._is_final = False  # the last export has the final weights
        pushes_here = job.recipe.export.push_to_hub is not None and job.world.is_main
        self._hub_push = HubPush(job.recipe) if pushes_here else None

    @property
    def artifacts(self) -> dict[str, str]:
        """Return {kind of weights: folder} of the latest export, or {} before the first export."""
        return (
            {"lora" if self.job.engine.uses_lora else self.job.artifact_kind: str(self._last_export[1])}
            if self._last_export
            else {}
        )

    def after_step(self, step: int) -> None:
        every = self.job.recipe.checkpoint.export_every
        if every > 0 and step % every == 0 and self.job.engine.num_updates > 0:
            self._export_step(step)

    def export_at_end(self, step: int) -> None:
        """Export the final weights, unless this was already done, and log the code that loads the export."""
        if self._last_export is None or self._last_export[0] != step:
            self._export_step(step)
        assert self._last_export is not None
        folder, job = self._last_export[1], self.job
        job.monitor.log_at_close("load it with:\n" + job.loading_lines(folder))
        self._is_final = True

    def finish_push(self) -> None:
        """Upload the final export to the Hub and wait for all uploads, which may take long."""
        if self.job.recipe.export.push_to_hub is not None:
            self.job.world.run_without_timeout(self._push_and_wait)

    def _push_and_wait(self) -> None:
        assert self._hub_push is not None
        if self._is_final and self.job.recipe.export.every == "last":
            self._push_export()
        self._hub_push.finish(lambda: self.job.stop_flag.is_set)

    def _export_step(self, step: int) -> None:
        job = self.job
        with job.timer("export"), show_wait("exporting the weights"):
            out = job.recipe.run.output_dir / EXPORTS / f"step_{step}"
            folder = job.world.run_checked(lambda: self._write_export(out))
        self._last_export = (step, folder)
        if job.mirror is not None:
            job.mirror.wake()
        if self._hub_push is not None and job.recipe.export.every == "each":
            self._push_export()

    def _write_export(self, out: Path) -> Path:
        """Export the weights. Raises RunError for an unexpected error, so that all ranks still save a checkpoint.

        Errors after which the ranks cannot save a checkpoint together are raised unchanged: errors of the
        communication, and errors for lack of memory.
        """
        try:
            return self.job.export_weights(out)
        except (UserError, GatherError):
            raise
        except Exception as error:
            if is_communication_error(error) or is_out_of_memory(error):
                raise
            log.exception("the export failed")
            raise RunError(f"the weights cannot be exported to {out}: {describe_error(error)}") from error

    def _push_export(self) -> None:
        assert self._hub_push is not None
        assert self._last_export is not None
        step, folder = self._last_export
        self._hub_push.send(folder, self.job.export_spec.base, step, self.job.loading_lines(folder))
