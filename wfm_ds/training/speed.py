"""Throughput metrics of a step: samples per second, TFLOP/s and MFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.monitoring.stopwatch import MEMORY_TAG

if TYPE_CHECKING:
    from wfm_ds.engine.flop_counter import FlopCount
    from wfm_ds.runs.job import CommonJob

TERA = 1e12
SAMPLES_PER_SECOND = "perf/samples_per_second"
TOKENS_PER_SECOND = "perf/tokens_per_second"
TFLOPS_PER_GPU = "perf/tflops_per_gpu"
MFU = "perf/mfu"


def speed_metrics(job: CommonJob, work: FlopCount | None, samples: int, seconds: float) -> dict[str, float]:
    """Return samples per second, TFLOP/s and MFU of a step.

    work: FLOPs of this rank, None if unknown. samples: samples trained on all ranks. seconds: duration of the step.
    TFLOP/s and MFU are logged for rank 0. With data.buckets, other ranks may train other image sizes.
    """
    metrics = {SAMPLES_PER_SECOND: samples / seconds}
    if work is None:
        return metrics
    peak = job.recipe.logging.peak_tflops or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    # The ranks of a replica share the work of its forwards.
    return metrics | tflops_and_mfu(work, seconds * job.world.sp_size, peak)


def tflops_and_mfu(work: FlopCount, seconds: float, peak: float | None) -> dict[str, float]:
    """Return the metrics TFLOP/s (with recomputation) and MFU (without recomputation). {} if no work was done.

    peak: peak TFLOP/s of the device; without it MFU is omitted.
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
