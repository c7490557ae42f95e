"""Training loop for vision-language models (VLM SFT), on packed sequences of conversations."""

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
    """One language model run on one rank."""

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
        """Return the FLOPs of this rank's packed sequences since the last call."""
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
    """VLM training loop. One step is one optimizer step on the packed sequences of `source`."""

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
        """weights_by_sample: weight conversations equally, instead of tokens. rejected: number of unusable
        conversations by reason."""
        super().__init__(job, validator, exporter, checkpoints)
        self.source, self.by_sample, self.rejected = source, by_sample, rejected

    def wait(self, step: int) -> bool:
        """Return True at once. Data is prefetched, and `train_step` waits for it."""
        return True

    def train_on(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            data: StepRows = world.checked(lambda: self.source.step(step, world.dp_rank, world.dp_size))
            rows = read_by_all(world, data.rows)
            batches = self.micro_batches(rows)
        labelled, samples = (sum(len(b.kept) for b in batches), sum(b.num_samples for b in batches))
        # Unreadable conversations are only known now: count the actual terms over all ranks.
        sums = world.replica_sums(
            {
                "labelled": labelled,
                "samples": samples,
                "tokens": sum(b.input_ids.numel() for b in batches),
                "bad": data.num_bad,
                "tried": data.num_tried,
            }
        )
        counts = {name: round(value) for name, value in sums.items()}
        self.source.judge(counts["bad"], counts["tried"], job.recipe.data.max_bad_fraction)
        with job.timer("train"):
            sample_ids = [sample.id for row in rows for sample in row]
            metrics = self.optimize(batches, counts["samples" if self.by_sample else "labelled"], sample_ids)
        return StepReport(self.measures(step, counts), [metrics], counts["samples"], counts["tokens"])

    def micro_batches(self, rows: Sequence[list[Sample]]) -> list[RowBatch]:
        """Split this rank's packed sequences into micro-batches.

        Conversations do not attend to each other, so the sequences of a micro-batch are concatenated.
        """
        parts = chunks(rows, self.job.recipe.engine.micro_batch_size)
        return [self.job.maker.row([sample for row in part for sample in row]) for part in parts]

    def optimize(self, batches: Sequence[RowBatch], num_terms: int, names: Sequence[str]) -> dict[str, float]:
        """Run one optimizer step on this rank's batches. num_terms: loss denominator over all ranks."""
        engine = self.job.engine
        if num_terms == 0:
            result = engine.skip()
        else:
            engine.expect(len(batches))
            for batch in batches:
                self.job.work.note(batch)
                row = batch.to(self.job.world.device)
                prediction = self.job.model.predict(row)
                engine.backward((prediction.losses * row.weights).sum(), num_terms)
                losses = prediction.losses.detach()
                self.meter.add({"vlm/loss": losses, "vlm/token_accuracy": prediction.hits}, torch.ones_like(losses))
            result = engine.step()
        self.finite.watch(result, names)
        if result.applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | engine_metrics(self.job, result)

    def measures(self, step: int, counts: Mapping[str, int]) -> dict[str, float]:
        """Return the data metrics of a step."""
        capacity = self.job.derived.samples_per_step * self.job.recipe.data.max_tokens
        bad = {f"data/bad/{reason}": float(count) for reason, count in self.rejected.items()}
        bad["data/bad/media"] += self.source.bad
        return {
            "vlm/tokens": float(counts["tokens"]),
            "vlm/labelled_tokens": float(counts["labelled"]),
            "vlm/conversations": float(counts["samples"]),
            "vlm/fill": counts["tokens"] / capacity,
            "data/epoch": self.source.epoch(step),
            **bad,
        }

    def own_state(self) -> dict[str, Any]:
        """See the base class. The packed sequences depend only on the step."""
        return {"source": self.source.state()}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.source.restore(state["source"])


class HeldOut:
    """Validation loss and token accuracy on held-out conversations. Independent of step and number of ranks."""

    def __init__(self, job: LanguageJob, reader: SampleReader, data: Measured) -> None:
        """Read this replica's shard into memory. Unreadable conversations are skipped."""
        self.job, self.last = job, dict[str, float]()
        self._evaluated_at = -1
        rows = packed(data.lengths, job.recipe.data.max_tokens)
        world = job.world
        shard = range(world.dp_rank, math.ceil(len(rows) / world.dp_size) * world.dp_size, world.dp_size)
        # Pad with empty sequences: all ranks must run the same number of forward passes.
        samples = [readable(reader, [data.conversations[i] for i in rows[k]] if k < len(rows) else []) for k in shard]
        self._samples, self._rows = samples, list[RowBatch]()

    def make_rows(self) -> None:
        """Build the batches from the samples read. Collective."""
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
        """Compute `val/loss` and `val/token_accuracy` of the evaluation weights: means over all labelled tokens."""
        job, self._evaluated_at = self.job, step
        if not job.world.any(bool(self._rows)):
            return
        sums = dict.fromkeys(("loss", "hits", "tokens"), 0.0)
        with job.timer("validation"), job.engine.policy(job.evaluation_policy), torch.no_grad():
            for batch in self._rows:
                row = batch.to(job.world.device)
                prediction = job.model.predict(row)
                sums["loss"] += float(prediction.losses.double().sum())
                sums["hits"] += float(prediction.hits.sum())
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
    """Keep only the samples that all ranks of the replica could read. Collective.

    Each rank reads the data itself, and all ranks of a replica must have the same packed sequence.
    """
    if world.sp_size == 1:
        return rows
    first = world.rank - world.sp_rank
    ids_by_rank = world.gather([[sample.id for sample in row] for row in rows])[first : first + world.sp_size]
    common = [set(row).intersection(*others) for row, *others in zip(*ids_by_rank, strict=True)]
    return [[sample for sample in row if sample.id in ids] for row, ids in zip(rows, common, strict=True)]


def readable(reader: SampleReader, conversations: Sequence[Conversation]) -> list[Sample]:
    """Read these conversations. Ones with unreadable images or videos are logged and skipped."""
    samples = []
    for conversation in conversations:
        try:
            samples.append(reader.read(conversation))
        except BadConversation as error:
            log.warning("skipped in validation: %s", error)
    return samples
