"""Results of a step and of a run: the metrics of a step, the limit of failed steps, and what the run reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wfm_ds.errors import RunError
from wfm_ds.training.speed import TOKENS, speed_metrics, speed_note

if TYPE_CHECKING:
    from wfm_ds.engine.engine import StepResult
    from wfm_ds.run.job import CommonJob

log = logging.getLogger(__name__)

MAX_NONFINITE_STEPS = 3
HEADLINES = ("reward/total/mean", "sft/loss", "dpo/loss", "loss/total", "vlm/loss")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a step, the same on every rank."""

    step: Mapping[str, float]  # metrics of the step as a whole
    updates: Sequence[Mapping[str, float]]  # metrics of each of its optimizer steps
    samples: int  # that it trained on
    tokens: int | None = None  # of a language model

    @property
    def lines(self) -> list[Mapping[str, float]]:
        """Metrics by optimizer step; the first has those of the whole step too."""
        return [{**self.step, **self.updates[0]}, *self.updates[1:]]

    @property
    def last(self) -> Mapping[str, float]:
        """The last value of each metric."""
        return {**self.step, **self.updates[-1]}


@dataclass(frozen=True, slots=True)
class Agreed:
    """Facts that some rank knew when a step ended and all ranks know since, for decisions that they take together."""

    stop: bool  # asked to stop
    save: bool  # asked for a checkpoint
    writing: bool  # its share of the last checkpoint is not on disk yet


class FiniteSteps:
    """Three optimizer steps in a row with a non-finite loss or gradient stop the run."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def watch(self, result: StepResult, sample_ids: Sequence[str]) -> None:
        """Count a step by the engine's answer, which is the same on all ranks; call it on every rank."""
        self.in_a_row = 0 if result.applied else self.in_a_row + 1
        if not result.applied:
            log.warning(
                "step not applied: loss or gradient is not finite; samples of this rank: %s", ", ".join(sample_ids)
            )
        if self.in_a_row >= MAX_NONFINITE_STEPS:
            raise RunError(
                f"{self.in_a_row} optimizer steps in a row had a non-finite loss or gradient: lower optimizer.lr"
            )


def engine_metrics(job: CommonJob, result: StepResult) -> dict[str, float]:
    return {
        "optim/grad_norm": result.grad_norm,
        "optim/clipped": float(result.clipped),
        "optim/lr": result.lr,
        "optim/skipped_steps": float(job.engine.num_skipped),
    }


def finish_step(job: CommonJob, step: int, report: StepReport, *, writing: bool) -> Agreed:
    """Write the metrics of a step's optimizer steps, one line each; collective, in one exchange.

    The first line also has the times, counts and speed of the whole step. writing: this rank's share of a checkpoint is
    not on disk yet.
    """
    first, *others = report.lines
    work = job.take_work()  # within the step's time: it takes seconds at first
    times, agreed = agree(job, job.timer.lap(), writing=writing)
    speed = speed_metrics(job, work, report.samples, times["time/step"])
    if report.tokens is not None:
        speed |= {TOKENS: report.tokens / times["time/step"]}
    counts = job.take_counts()
    first_update = (step - 1) * job.derived.updates_per_step + 1
    for update, metrics in enumerate([{**first, **times, **counts, **speed}, *others], first_update):
        job.monitor.scalars(update, metrics)
    headline = next((m for m in HEADLINES if m in first), None)
    notes = [f"{headline} {first[headline]:.4f}"] if headline else []
    job.monitor.progress(step, samples=report.samples, note=", ".join([*notes, speed_note({**times, **speed})]))
    return agreed


def agree(job: CommonJob, measured: Mapping[str, float], *, writing: bool) -> tuple[dict[str, float], Agreed]:
    """Return the times of the slowest rank, the memory of the largest, and what all ranks must agree on; collective."""
    flags = {"save": job.stop.take_save(), "stop": job.stop.is_set, "writing": writing}
    largest = job.world.maxima({**measured, **flags})
    return {name: largest[name] for name in measured}, Agreed(**{name: largest[name] > 0 for name in flags})
