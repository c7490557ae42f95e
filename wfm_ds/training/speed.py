"""Throughput metrics of a step: samples per second, TFLOP/s and MFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wfm_ds.engine.peaks import peak_tflops
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.monitoring.stopwatch import MEMORY

if TYPE_CHECKING:
    from wfm_ds.engine.work import Work
    from wfm_ds.run.job import CommonJob

TERA = 1e12
SAMPLES = "perf/samples_per_second"
TOKENS = "perf/tokens_per_second"
TFLOPS = "perf/tflops_per_gpu"
MFU = "perf/mfu"


def speed_metrics(job: CommonJob, work: Work | None, samples: int, seconds: float) -> dict[str, float]:
    """Return the throughput metrics of a step. samples: trained samples over all ranks; seconds: duration of the step.

    work: FLOPs of this rank, None if unknown. TFLOP/s and MFU are reported for rank 0. Other ranks run the same
    forward passes, except that sizes differ with data.buckets.
    """
    metrics = {SAMPLES: samples / seconds}
    if work is None:
        return metrics
    peak = job.recipe.logging.peak_tflops or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    # The ranks of a replica share the work of its forwards.
    return metrics | rates(work, seconds * job.world.sp_size, peak)


def rates(work: Work, seconds: float, peak: float | None) -> dict[str, float]:
    """Return TFLOP/s of all work, and MFU (from the work without recomputation). Empty if no work was done."""
    if work.needed == 0:
        return {}
    tflops = {TFLOPS: (work.needed + work.repeated) / TERA / seconds}
    return tflops if peak is None else tflops | {MFU: work.needed / TERA / seconds / peak}


def speed_note(metrics: Mapping[str, float]) -> str:
    """Return a console summary such as `312 TFLOP/s a GPU, MFU 32 %, 61.2 GiB`. Unknown values are omitted."""
    parts = []
    if TFLOPS in metrics:
        parts.append(f"{metrics[TFLOPS]:.3g} TFLOP/s a GPU")
    if MFU in metrics:
        parts.append(f"MFU {metrics[MFU]:.0%}")
    return ", ".join([*parts, f"{metrics[MEMORY]:.1f} GiB"])
