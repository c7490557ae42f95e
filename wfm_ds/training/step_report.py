"""Report of a training step: its metrics, its speed and the state that all ranks agree on.

The module also contains the limit on consecutive non-finite optimizer steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import RunError
from wfm_ds.monitoring.meters import MEMORY_TAG

if TYPE_CHECKING:
    from wfm_ds.engine.engine import StepResult
    from wfm_ds.engine.flop_counter import FlopCount
    from wfm_ds.runs.job import CommonJob

log = logging.getLogger(__name__)

TERA = 1e12
SAMPLES_PER_SECOND = "perf/samples_per_second"
TOKENS_PER_SECOND = "perf/tokens_per_second"
TFLOPS_PER_GPU = "perf/tflops_per_gpu"
MFU = "perf/mfu"
MAX_NONFINITE_STEPS = 3
HEADLINE_METRICS = ("reward/total/mean", "sft/loss", "dpo/loss", "loss/total", "vlm/loss")


def speed_metrics(job: CommonJob, work: FlopCount | None, samples: int, seconds: float) -> dict[str, float]:
    """Return the metrics samples per second, TFLOP/s and MFU of a step.

    work: FLOPs of this rank, or None if unknown. samples: number of samples trained on all ranks. seconds: duration of
    the step. Only rank 0's TFLOP/s and MFU are logged. With data.buckets, the values of other ranks may differ.
    """
    metrics = {SAMPLES_PER_SECOND: samples / seconds}
    if work is None:
        return metrics
    peak = job.recipe.logging.peak_tflops or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    # The ranks of a replica share the work of its forwards.
    return metrics | tflops_and_mfu(work, seconds * job.world.sp_size, peak)


def tflops_and_mfu(work: FlopCount, seconds: float, peak: float | None) -> dict[str, float]:
    """Return the metrics TFLOP/s and MFU. Returns {} if no FLOPs were counted.

    TFLOP/s includes the recomputation of activations, MFU does not. peak: peak TFLOP/s of the device, or None to omit
    MFU.
    """
    if work.required == 0:
        return {}
    tflops = {TFLOPS_PER_GPU: (work.required + work.recomputed) / TERA / seconds}
    return tflops if peak is None else tflops | {MFU: work.required / TERA / seconds / peak}


def speed_summary(metrics: Mapping[str, float]) -> str:
    """Return a console summary such as `312 TFLOP/s a GPU, MFU 32 %, 61.2 GiB`. Unknown values are omitted."""
    parts = []
    if TFLOPS_PER_GPU in metrics:
        parts.append(f"{metrics[TFLOPS_PER_GPU]:.3g} TFLOP/s a GPU")
    if MFU in metrics:
        parts.append(f"MFU {metrics[MFU]:.0%}")
    return ", ".join([*parts, f"{metrics[MEMORY_TAG]:.1f} GiB"])


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics and counts of a training step. All ranks have identical reports."""

    step_metrics: Mapping[str, float]  # metrics of the step as a whole
    update_metrics: Sequence[Mapping[str, float]]  # metrics of each of its optimizer steps
    num_samples: int  # trained samples
    num_tokens: int | None = None  # trained tokens, for language models

    @property
    def metrics_by_update(self) -> list[Mapping[str, float]]:
        """Return the metrics of each optimizer step. The first entry also contains the metrics of the whole step."""
        return [{**self.step_metrics, **self.update_metrics[0]}, *self.update_metrics[1:]]

    @property
    def last_metrics(self) -> Mapping[str, float]:
        return {**self.step_metrics, **self.update_metrics[-1]}


@dataclass(frozen=True, slots=True)
class StepFlags:
    """State at the end of a step, agreed across ranks. A flag is True if it is True on at least one rank."""

    stop: bool  # stop requested
    save: bool  # checkpoint requested
    writing: bool  # the last checkpoint is still being written


class NonFiniteLimit:
    """Stops the run after MAX_NONFINITE_STEPS consecutive optimizer steps with a non-finite loss or gradient."""

    def __init__(self) -> None:
        self.num_consecutive = 0

    def check(self, result: StepResult, sample_ids: Sequence[str]) -> None:
        """Count consecutive non-finite optimizer steps. Raises RunError on all ranks after MAX_NONFINITE_STEPS."""
        self.num_consecutive = 0 if result.is_applied else self.num_consecutive + 1
        if not result.is_applied:
            log.warning(
                "step not applied: non-finite loss or gradient; samples of this rank: %s", ", ".join(sample_ids)
            )
        if self.num_consecutive >= MAX_NONFINITE_STEPS:
            raise RunError(
                f"{self.num_consecutive} consecutive optimizer steps had a non-finite loss or gradient: lower "
                "optimizer.lr"
            )


def engine_metrics(job: CommonJob, result: StepResult) -> dict[str, float]:
    return {
        "optim/grad_norm": result.grad_norm,
        "optim/clipped": float(result.is_clipped),
        "optim/lr": result.lr,
        "optim/skipped_steps": float(job.engine.num_skipped),
    }


def finish_step(job: CommonJob, step: int, report: StepReport, *, writing: bool) -> StepFlags:
    """Write one line of metrics per optimizer step, and return the agreed step flags. Collective.

    The first line also contains the times, forward counts and speed of the whole step. writing: whether this rank is
    still writing its shard of a checkpoint.
    """
    first, *others = report.metrics_by_update
    work = job.pop_work()  # part of the step time: the first call takes seconds
    times, agreed = reduce_times_and_flags(job, job.timer.end_step(), writing=writing)
    speed = speed_metrics(job, work, report.num_samples, times["time/step"])
    if report.num_tokens is not None:
        speed |= {TOKENS_PER_SECOND: report.num_tokens / times["time/step"]}
    counts = job.pop_forward_counts()
    first_update = (step - 1) * job.run_sizes.updates_per_step + 1
    for update, metrics in enumerate([{**first, **times, **counts, **speed}, *others], first_update):
        job.monitor.log_scalars(update, metrics)
    headline = next((m for m in HEADLINE_METRICS if m in first), None)
    notes = [f"{headline} {first[headline]:.4f}"] if headline else []
    job.monitor.update_progress(
        step, samples=report.num_samples, note=", ".join([*notes, speed_summary({**times, **speed})])
    )
    return agreed


def reduce_times_and_flags(
    job: CommonJob, times: Mapping[str, float], *, writing: bool
) -> tuple[dict[str, float], StepFlags]:
    """Return (the maximum over ranks of each time and memory peak, the agreed step flags). Collective."""
    flags = {"save": job.stop_flag.take_save_request(), "stop": job.stop_flag.is_set, "writing": writing}
    largest = job.world.max_over_ranks({**times, **flags})
    return {name: largest[name] for name in times}, StepFlags(**{name: largest[name] > 0 for name in flags})
