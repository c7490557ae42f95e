"""Training loop for vision-language models, on packed sequences of conversations."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from wfm_ds.chunks import split_into_chunks
from wfm_ds.distributed.world import World
from wfm_ds.engine.flop_counter import FlopCount
from wfm_ds.language.annotations import BadConversation, Conversation
from wfm_ds.language.data import SizedConversations
from wfm_ds.language.export import LanguageTarget, export_language, loading_code
from wfm_ds.language.flops import SequenceWork
from wfm_ds.language.model import LanguageModel
from wfm_ds.language.packed_sequences import ConversationReader, ConversationSample, PackedSequence, SequencePacker
from wfm_ds.language.sequence_source import SequenceSource, StepSequences, pack_items
from wfm_ds.runs.job import CommonJob
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.loop import StepReport, TrainingLoop
from wfm_ds.training.validation import is_due

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LanguageJob(CommonJob):
    """One rank's model, engine and services in a vision-language training run."""

    model: LanguageModel
    export_target: LanguageTarget
    row_maker: SequencePacker
    row_work: SequenceWork

    artifact_kind: ClassVar[str] = "model"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def export_spec(self) -> LanguageTarget:
        return self.export_target

    def pop_work(self) -> FlopCount:
        return self.row_work.pop_work()

    def export_weights(self, out: Path) -> Path:
        return export_language(
            self.export_target,
            self.engine,
            out,
            policy=self.evaluation_policy,
            dtype=self.dtype,
            is_main=self.world.is_main,
        )

    def loading_lines(self, folder: Path) -> str:
        return loading_code(self.export_target.base, folder, self.engine.uses_lora)


class LanguageLoop(TrainingLoop):
    """Training loop for vision-language models.

    Each step is one optimizer step on the sequences that `source` reads.
    """

    job: LanguageJob

    def __init__(
        self,
        job: LanguageJob,
        source: SequenceSource,
        validator: LanguageValidator,
        exporter: Exporter,
        checkpoints: Checkpoints,
        *,
        weights_by_sample: bool,
        rejected: Mapping[str, int],
    ) -> None:
        """weights_by_sample: give every conversation the same loss weight. If False, every token has the same weight.

        rejected: {reason: number of rejected conversations}.
        """
        super().__init__(job, validator, exporter, checkpoints)
        self.source, self.weights_by_sample, self.rejected = source, weights_by_sample, rejected

    def wait_for_data(self, step: int) -> bool:
        return True  # data is prefetched, and train_step waits for it

    def train_step(self, step: int) -> StepReport:
        job, world = self.job, self.job.world
        with job.timer("data_wait"):
            data: StepSequences = world.run_checked(lambda: self.source.read_step(step, world.dp_rank, world.dp_size))
            rows = keep_common_samples(world, data.sequences)
            batches = self.micro_batches(rows)
        labelled, samples = (sum(len(b.label_positions) for b in batches), sum(b.num_samples for b in batches))
        # Only now is it known which conversations are unreadable, so count the actual terms over all ranks.
        sums = world.sum_over_replicas(
            {
                "labelled": labelled,
                "samples": samples,
                "tokens": sum(b.input_ids.numel() for b in batches),
                "bad": data.num_bad,
                "tried": data.num_tried,
            }
        )
        counts = {name: round(value) for name, value in sums.items()}
        self.source.check_bad_fraction(counts["bad"], counts["tried"], job.recipe.data.max_bad_fraction)
        with job.timer("train"):
            sample_ids = [sample.id for row in rows for sample in row]
            metrics = self.optimize(batches, counts["samples" if self.weights_by_sample else "labelled"], sample_ids)
        return StepReport(self.data_metrics(step, counts), [metrics], counts["samples"], counts["tokens"])

    def micro_batches(self, rows: Sequence[list[ConversationSample]]) -> list[PackedSequence]:
        """Concatenate packed sequences into micro-batches. Each token attends only to its own conversation."""
        parts = split_into_chunks(rows, self.job.recipe.engine.micro_batch_size)
        return [self.job.row_maker.pack_samples([sample for row in part for sample in row]) for part in parts]

    def optimize(
        self, batches: Sequence[PackedSequence], num_terms: int, sample_ids: Sequence[str]
    ) -> dict[str, float]:
        """Run one optimizer step and return its metrics. num_terms: loss denominator, summed over all ranks."""
        engine = self.job.engine
        if num_terms == 0:
            result = engine.skip_step()
        else:
            engine.expect_backwards(len(batches))
            for batch in batches:
                self.job.row_work.record(batch)
                row = batch.to_device(self.job.world.device)
                prediction = self.job.model.predict(row)
                engine.backward((prediction.losses * row.weights).sum(), num_terms)
                losses = prediction.losses.detach()
                self.meter.add({"vlm/loss": losses, "vlm/token_accuracy": prediction.hits}, torch.ones_like(losses))
            result = engine.step()
            self.nonfinite_limit.check(result, sample_ids)
        if result.is_applied:
            engine.update_ema()
        return self.meter.collect(self.job.world) | result.metrics()

    def data_metrics(self, step: int, counts: Mapping[str, int]) -> dict[str, float]:
        capacity = self.job.run_sizes.samples_per_step * self.job.recipe.data.max_tokens
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

    def extra_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state["source"])


class LanguageValidator:
    """Computes loss and token accuracy on held-out conversations, which do not depend on the number of ranks."""

    def __init__(self, job: LanguageJob, reader: ConversationReader, data: SizedConversations) -> None:
        """Read this replica's shard of the held-out conversations into memory. Unreadable conversations are skipped."""
        self.job, self.last_metrics = job, dict[str, float]()
        self._evaluated_at = -1
        rows = pack_items(data.lengths, job.recipe.data.max_tokens)
        world = job.world
        shard = range(world.dp_rank, math.ceil(len(rows) / world.dp_size) * world.dp_size, world.dp_size)
        # Pad with empty sequences: all ranks must run the same number of forward passes.
        samples = [
            read_conversations(reader, [data.conversations[i] for i in rows[k]] if k < len(rows) else []) for k in shard
        ]
        self._samples, self._batches = samples, list[PackedSequence]()

    def build_rows(self) -> None:
        """Pack the conversations of this replica. All ranks must call this before `evaluate`."""
        self._batches = [
            self.job.row_maker.pack_samples(row) for row in keep_common_samples(self.job.world, self._samples)
        ]
        self._samples = []

    def evaluate_at_start(self, step: int) -> None:
        if self.job.recipe.validation.at_start and step == 0 and self._evaluated_at != 0:
            self.evaluate(0)
        self.job.timer.restart()

    def after_step(self, step: int) -> None:
        if is_due(step, self.job.recipe.validation.every):
            self.evaluate(step)

    def evaluate_at_end(self, step: int) -> dict[str, float]:
        if self._evaluated_at != step:
            self.evaluate(step)
        return self.last_metrics

    def state_dict(self) -> dict[str, Any]:
        return {"evaluated_at": self._evaluated_at, "metrics": self.last_metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._evaluated_at, self.last_metrics = state["evaluated_at"], state["metrics"]

    def evaluate(self, step: int) -> None:
        """Log `val/loss` and `val/token_accuracy` of the evaluation weights, as averages over all labelled tokens."""
        job, self._evaluated_at = self.job, step
        if not job.world.any_rank(bool(self._batches)):
            return
        sums = dict.fromkeys(("loss", "hits", "tokens"), 0.0)
        with job.timer("validation"), job.engine.use_policy(job.evaluation_policy), torch.no_grad():
            for batch in self._batches:
                row = batch.to_device(job.world.device)
                prediction = job.model.predict(row)
                sums["loss"] += float(prediction.losses.double().sum())
                sums["hits"] += float(prediction.hits.sum())
                sums["tokens"] += len(row.label_positions)
        totals = job.world.sum_over_replicas(sums)
        if not totals["tokens"]:
            return
        self.last_metrics = {
            "val/loss": totals["loss"] / totals["tokens"],
            "val/token_accuracy": totals["hits"] / totals["tokens"],
        }
        job.monitor.log_scalars(step, self.last_metrics)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.last_metrics.items())
        job.monitor.log_message(f"step {step}: {shown}")


def keep_common_samples(world: World, rows: list[list[ConversationSample]]) -> list[list[ConversationSample]]:
    """Return only the samples that every rank of the replica could read. All ranks must call this."""
    if world.sp_size == 1:
        return rows
    first = world.rank - world.sp_rank
    ids_by_rank = world.gather([[sample.id for sample in row] for row in rows])[first : first + world.sp_size]
    common = [set(row).intersection(*others) for row, *others in zip(*ids_by_rank, strict=True)]
    return [[sample for sample in row if sample.id in ids] for row, ids in zip(rows, common, strict=True)]


def read_conversations(reader: ConversationReader, conversations: Sequence[Conversation]) -> list[ConversationSample]:
    """Read held-out conversations. Conversations with unreadable images or videos are skipped with a warning."""
    samples = []
    for conversation in conversations:
        try:
            samples.append(reader.read(conversation))
        except BadConversation as error:
            log.warning("skipped in validation: %s", error)
    return samples
