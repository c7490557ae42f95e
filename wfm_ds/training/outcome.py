"""Step reports: metrics of a step, flags agreed across ranks, and the limit of non-finite steps."""

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
    """Metrics and counts of a training step. Identical on every rank."""

    step: Mapping[str, float]  # metrics of the step as a whole
    updates: Sequence[Mapping[str, float]]  # metrics of each of its optimizer steps
    samples: int  # trained samples
    tokens: int | None = None  # trained tokens, for language models

    @property
    def lines(self) -> list[Mapping[str, float]]:
        """Return the metrics of each optimizer step; the first one includes the metrics of the whole step."""
        return [{**self.step, **self.updates[0]}, *self.updates[1:]]

    @property
    def last(self) -> Mapping[str, float]:
        """Return the last value of each metric."""
        return {**self.step, **self.updates[-1]}


@dataclass(frozen=True, slots=True)
class Agreed:
    """End-of-step state agreed across ranks: each flag is True if it is True on any rank."""

    stop: bool  # stop requested
    save: bool  # checkpoint requested
    writing: bool  # the last checkpoint is still being written


class FiniteSteps:
    """Stops the run after MAX_NONFINITE_STEPS consecutive optimizer steps with a non-finite loss or gradient."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def watch(self, result: StepResult, sample_ids: Sequence[str]) -> None:
        """Check the result of an optimizer step, which is identical on every rank. Raises RunError at the limit."""
        self.in_a_row = 0 if result.applied else self.in_a_row + 1
        if not result.applied:
            log.warning(
                "step not applied: non-finite loss or gradient; samples of this rank: %s", ", ".join(sample_ids)
            )
        if self.in_a_row >= MAX_NONFINITE_STEPS:
            raise RunError(
                f"{self.in_a_row} consecutive optimizer steps had a non-finite loss or gradient: lower optimizer.lr"
            )


def engine_metrics(job: CommonJob, result: StepResult) -> dict[str, float]:
    return {
        "optim/grad_norm": result.grad_norm,
        "optim/clipped": float(result.clipped),
        "optim/lr": result.lr,
        "optim/skipped_steps": float(job.engine.num_skipped),
    }


def finish_step(job: CommonJob, step: int, report: StepReport, *, writing: bool) -> Agreed:
    """Write the metrics of a step, one line per optimizer step, and agree on the step flags. Collective.

    The first line includes the times, counts and speed of the whole step. writing: whether this rank is still writing
    its shard of a checkpoint.
    """
    first, *others = report.lines
    work = job.take_work()  # part of the step time: the first call takes seconds
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
    """Return (maxima over ranks of times and memory, flags agreed across ranks). Collective."""
    flags = {"save": job.stop.take_save(), "stop": job.stop.is_set, "writing": writing}
    largest = job.world.maxima({**measured, **flags})
    return {name: largest[name] for name in measured}, Agreed(**{name: largest[name] > 0 for name in flags})
