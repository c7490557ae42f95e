"""Fine-tuning of a vision-language model, top to bottom: rows of conversations, the losses of their answers."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from wfm_ds.chunks import chunks
from wfm_ds.distributed.world import World
from wfm_ds.engine.work import Work
from wfm_ds.language.annotations import BadConversation, Conversation
from wfm_ds.language.data import Measured
from wfm_ds.language.export import LanguageTarget, export_language, loading_lines
from wfm_ds.language.flops import RowWork
from wfm_ds.language.model import LanguageModel
from wfm_ds.language.packing import packed
from wfm_ds.language.rows import RowBatch, RowMaker, Sample, SampleReader
from wfm_ds.language.source import RowSource, StepRows
from wfm_ds.run.job import CommonJob
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import Loop
from wfm_ds.training.outcome import StepReport, engine_metrics
from wfm_ds.training.validation import due

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LanguageJob(CommonJob):
    """One run of a language model on one rank."""

    model: LanguageModel
    target: LanguageTarget
    maker: RowMaker
    work: RowWork

    artifact: ClassVar[str] = "model"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def export_note(self) -> LanguageTarget:
        return self.target

    def take_work(self) -> Work:
        """The FLOPs of this rank's rows since the last call."""
        return self.work.take()

    def export(self, out: Path) -> Path:
        return export_language(
            self.target,
            self.engine,
            out,
            policy=self.evaluation_policy,
            dtype=self.dtype,
            is_main=self.world.is_main,
        )

    def loading_lines(self, folder: Path) -> str:
        return loading_lines(self.target.base, folder, self.engine.lora)


class LanguageLoop(Loop):
    """One step is one optimizer step on the rows of `source`."""

    job: LanguageJob

    def __init__(
        self,
        job: LanguageJob,
        source: RowSource,
        validator: HeldOut,
        exporter: Exporter,
        checkpoints: Checkpoints,
        *,
        by_sample: bool,
        rejected: Mapping[str, int],
    ) -> None:
        """by_sample: each conversation counts alike, not each token. rejected: rows of the data that are not used, by
        reason."""
        super().__init__(job, validator, exporter, checkpoints)
        self.source, self.by_sample, self.rejected = source, by_sample, rejected

    def wait(self, step: int) -> bool:
        """Return at once: the data are read ahead, and `train_on` waits for them."""
        return True

    def train_on(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            found: StepRows = world.checked(lambda: self.source.step(step, world.dp_rank, world.dp_size))
            rows = read_by_all(world, found.rows)
            batches = self.micro_batches(rows)
        labelled, samples = (sum(len(b.kept) for b in batches), sum(b.num_samples for b in batches))
        # What could not be read shows only now: the terms are those that are there, on all ranks together.
        sums = world.replica_sums(
            {
                "labelled": labelled,
                "samples": samples,
                "tokens": sum(b.input_ids.numel() for b in batches),
                "bad": found.num_bad,
                "tried": found.num_tried,
            }
        )
        counts = {name: round(value) for name, value in sums.items()}
        self.source.judge(counts["bad"], counts["tried"], job.recipe.data.max_bad_fraction)
        with job.timer("train"):
            names = [sample.id for row in rows for sample in row]
            metrics = self.optimize(batches, counts["samples" if self.by_sample else "labelled"], names)
        return StepReport(self.measures(step, counts), [metrics], counts["samples"], counts["tokens"])

    def micro_batches(self, rows: Sequence[list[Sample]]) -> list[RowBatch]:
        """The rows of this rank in micro-batches. Conversations do not see each other, so neighbouring rows are one."""
        parts = chunks(rows, self.job.recipe.engine.micro_batch_size)
        return [self.job.maker.row([sample for row in part for sample in row]) for part in parts]

    def optimize(self, batches: Sequence[RowBatch], num_terms: int, names: Sequence[str]) -> dict[str, float]:
        """One optimizer step on this rank's rows; num_terms: of all ranks."""
        engine = self.job.engine
        if num_terms == 0:
            result = engine.skip()
        else:
            engine.expect(len(batches))
            for batch in batches:
                self.job.work.note(batch)
                row = batch.to(self.job.world.device)
                found = self.job.model.predict(row)
                engine.backward((found.losses * row.weights).sum(), num_terms)
                losses = found.losses.detach()
                self.meter.add({"vlm/loss": losses, "vlm/token_accuracy": found.hits}, torch.ones_like(losses))
            result = engine.step()
        self.finite.watch(result, names)
        if result.applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | engine_metrics(self.job, result)

    def measures(self, step: int, counts: Mapping[str, int]) -> dict[str, float]:
        """Metrics of a step's rows."""
        room = self.job.derived.samples_per_step * self.job.recipe.data.max_tokens
        bad = {f"data/bad/{reason}": float(count) for reason, count in self.rejected.items()}
        bad["data/bad/media"] += self.source.bad
        return {
            "vlm/tokens": float(counts["tokens"]),
            "vlm/labelled_tokens": float(counts["labelled"]),
            "vlm/conversations": float(counts["samples"]),
            "vlm/fill": counts["tokens"] / room,
            "data/epoch": self.source.epoch(step),
            **bad,
        }

    def own_state(self) -> dict[str, Any]:
        """The rows follow from the step alone."""
        return {"source": self.source.state()}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.source.restore(state["source"])


class HeldOut:
    """The loss and the accuracy on conversations held out, the same rows at every step and number of ranks."""

    def __init__(self, job: LanguageJob, reader: SampleReader, data: Measured) -> None:
        """Read this replica's share, and keep it. What cannot be read is left out."""
        self.job, self.last = job, dict[str, float]()
        self._evaluated_at = -1
        rows = packed(data.lengths, job.recipe.data.max_tokens)
        world = job.world
        mine = range(world.dp_rank, math.ceil(len(rows) / world.dp_size) * world.dp_size, world.dp_size)
        # Blank rows where others have one more: a forward needs all ranks.
        samples = [readable(reader, [data.conversations[i] for i in rows[k]] if k < len(rows) else []) for k in mine]
        self._samples, self._rows = samples, list[RowBatch]()

    def make_rows(self) -> None:
        """Make the rows of what was read. Collective."""
        self._rows = [self.job.maker.row(row) for row in read_by_all(self.job.world, self._samples)]
        self._samples = []

    def at_start(self, step: int) -> None:
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()

    def after_step(self, step: int) -> None:
        if due(step, self.job.recipe.validation.every):
            self.evaluate(step)

    def at_end(self, step: int) -> dict[str, float]:
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last

    def state(self) -> dict[str, Any]:
        return {"evaluated_at": self._evaluated_at, "metrics": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last = state["evaluated_at"], state["metrics"]

    def evaluate(self, step: int) -> None:
        """Measure `val/loss` and `val/token_accuracy` of the evaluation weights: means over all labelled tokens."""
        job, self._evaluated_at = self.job, step
        if not job.world.any(bool(self._rows)):
            return
        sums = dict.fromkeys(("loss", "hits", "tokens"), 0.0)
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            for batch in self._rows:
                row = batch.to(job.world.device)
                found = job.model.predict(row)
                sums["loss"] += float(found.losses.double().sum())
                sums["hits"] += float(found.hits.sum())
                sums["tokens"] += len(row.kept)
        totals = job.world.replica_sums(sums)
        if not totals["tokens"]:
            return
        self.last = {
            "val/loss": totals["loss"] / totals["tokens"],
            "val/token_accuracy": totals["hits"] / totals["tokens"],
        }
        job.monitor.scalars(step, self.last)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.last.items())
        job.monitor.message(f"step {step}: {shown}")


def read_by_all(world: World, rows: list[list[Sample]]) -> list[list[Sample]]:
    """Return a replica's rows without the samples that one of its ranks could not read: each rank reads them itself,
    and all must have the same row. Collective."""
    if world.sp_size == 1:
        return rows
    first = world.rank - world.sp_rank
    of_ranks = world.gather([[sample.id for sample in row] for row in rows])[first : first + world.sp_size]
    common = [set(row).intersection(*others) for row, *others in zip(*of_ranks, strict=True)]
    return [[sample for sample in row if sample.id in ids] for row, ids in zip(rows, common, strict=True)]


def readable(reader: SampleReader, conversations: Sequence[Conversation]) -> list[Sample]:
    """Read these conversations but those whose media cannot be read, which are logged."""
    found = []
    for conversation in conversations:
        try:
            found.append(reader.read(conversation))
        except BadConversation as error:
            log.warning("left out of validation: %s", error)
    return found
