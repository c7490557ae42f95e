"""When weights are exported and pushed to the Hub. checkpoint/export.py writes the files."""

from __future__ import annotations

from pathlib import Path

from wfm_ds.run.hub_push import HubPush
from wfm_ds.run.job import CommonJob
from wfm_ds.run.layout import EXPORTS


class Exporter:
    """Writes `safetensors/step_<N>/` at the recipe's interval and at the end. All methods are collective."""

    def __init__(self, job: CommonJob) -> None:
        self.job = job
        self._written: tuple[int, Path] | None = None
        self._wanted = job.recipe.export.push_to_hub is not None
        self._push = HubPush(job.recipe) if self._wanted and job.world.is_main else None

    @property
    def artifacts(self) -> dict[str, str]:
        """Return the latest export of the run by kind, for result.json."""
        return {"lora" if self.job.engine.lora else self.job.artifact: str(self._written[1])} if self._written else {}

    def after_step(self, step: int) -> None:
        every = self.job.recipe.checkpoint.export_every
        if every > 0 and step % every == 0:
            self._export(step)

    def at_end(self, step: int) -> None:
        """Export the final weights unless this step is already exported, and print how to load them."""
        if self._written is None or self._written[0] != step:
            self._export(step)
        assert self._written is not None
        folder, job = self._written[1], self.job
        job.monitor.last_message("load it with:\n" + job.loading_lines(folder))
        if self._push is not None and job.recipe.export.every == "last":
            self._send(step, folder)
        if self._wanted:
            job.world.checked(self._finish, on="main")

    def _export(self, step: int) -> None:
        job = self.job
        with job.timer("export"):
            out = job.recipe.run.output_dir / EXPORTS / f"step_{step}"
            folder = job.world.checked(lambda: job.export(out))
        self._written = (step, folder)
        if job.mirror is not None:
            job.mirror.wake()
        if self._push is not None and job.recipe.export.every == "each":
            self._send(step, folder)

    def _send(self, step: int, folder: Path) -> None:
        assert self._push is not None
        self._push.send(folder, self.job.export_note.base, step, self.job.loading_lines(folder))

    def _finish(self) -> None:
        assert self._push is not None
        with self.job.timer("export"):
            self._push.finish()
