"""Base class of the training loops: evaluation, export, checkpoints, metrics and shutdown around each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from wfm_ds.distributed.lifecycle import seconds_since_start
from wfm_ds.engine.device_peaks import peak_tflops
from wfm_ds.engine.optimizer_steps import NonFiniteLimit
from wfm_ds.engine.preparation import DTYPES
from wfm_ds.errors import RunError, UserError
from wfm_ds.monitoring.meters import MEMORY_TAG, Meter
from wfm_ds.runs.job import CommonJob
from wfm_ds.runs.shutdown import RunOutcome
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.types import DEFAULT_ADAPTER

if TYPE_CHECKING:
    import torch

    from wfm_ds.engine.flop_counter import FlopCount

TERA = 1e12
SAMPLES_PER_SECOND = "perf/samples_per_second"
TOKENS_PER_SECOND = "perf/tokens_per_second"
TFLOPS_PER_GPU = "perf/tflops_per_gpu"
MFU = "perf/mfu"
HEADLINE_METRICS = ("reward/total/mean", "sft/loss", "dpo/loss", "dmd/gap", "loss/total", "vlm/loss")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics and counts of a training step. All ranks have identical reports."""

    step_metrics: Mapping[str, float]  # metrics of the step as a whole
    update_metrics: Sequence[Mapping[str, float]]  # metrics of each of its optimizer steps
    num_samples: int  # trained samples
    num_tokens: int | None = None  # trained tokens, for language models

    @property
    def metrics_by_update(self) -> list[Mapping[str, float]]:
        """Return the metrics of each optimizer step.

        The first entry also contains the metrics of the whole training step.
        """
        return [{**self.step_metrics, **self.update_metrics[0]}, *self.update_metrics[1:]]

    @property
    def last_metrics(self) -> Mapping[str, float]:
        return {**self.step_metrics, **self.update_metrics[-1]}


class PeriodicEvaluator(Protocol):
    """Interface of the evaluation during training. All ranks must call every method."""

    def evaluate_at_start(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def evaluate_at_end(self, step: int) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainingLoop(ABC):
    """Trains `job.engine` step by step. All ranks must call every method.

    Subclasses define the data and the loss of a step.
    """

    job: CommonJob
    validator: PeriodicEvaluator

    def __init__(
        self, job: CommonJob, validator: PeriodicEvaluator, exporter: Exporter, checkpoints: Checkpoints
    ) -> None:
        self.job, self.validator, self.exporter, self.checkpoints = job, validator, exporter, checkpoints
        self.meter, self.nonfinite_limit = Meter(), NonFiniteLimit()
        self.step = 0  # the current step during a step, otherwise the last completed one
        self.metrics: Mapping[str, float] = {}  # metrics of the last completed step

    def run_to_end(self) -> RunOutcome:
        """Train until the last step or a stop request, then export the weights.

        The outcome's status is `finished` after the last step, and `preempted` after a stop request. Raises RunError,
        without an export, if no optimizer step was applied.
        """
        job, preempted = self.job, False
        try:
            self.start()
            stop, first_step = job.should_stop(), self.step + 1
            while self.step < job.recipe.run.steps:
                if stop or not self.wait_for_data(self.step + 1):
                    self.checkpoints.save_at_stop(self)
                    preempted = True
                    break
                stop = self.run_step()
                if self.step == first_step:
                    job.monitor.log_message(f"first step completed {seconds_since_start():.0f} s after the start")
        except RunError:  # raised on all ranks; the weights of the last good step are still valid
            self.save_results()
            raise
        if not preempted and job.engine.num_updates == 0:
            raise RunError(
                f"nothing was trained and nothing is exported: no optimizer step was applied in {self.step} steps. "
                f"The warnings in {job.recipe.run.output_dir / 'logs' / 'rank_0.log'} say why"
            )
        self.save_results()
        # Do not delay a requested stop by an evaluation.
        evaluation = {} if preempted else self.validator.evaluate_at_end(self.step)
        outcome = RunOutcome(
            "preempted" if preempted else "finished", self.step, {**self.metrics, **evaluation}, self.final_warning()
        )
        result = job.recipe.run.output_dir / "result.json"
        job.monitor.log_message(f"{outcome.status} at step {outcome.step}; result in {result}")
        if outcome.message:
            job.monitor.log_at_close(outcome.message)
        job.monitor.set_outcome(outcome.status, outcome.metrics)
        return outcome

    def final_warning(self) -> str:
        """Return a warning for the end of the log and result.json, or "" if there is none."""
        return ""

    def save_results(self) -> None:
        """Wait until the last checkpoint is complete. Export the weights if any optimizer step was applied."""
        self.checkpoints.wait_for_save()
        if self.job.engine.num_updates == 0:
            return
        try:
            self.exporter.export_at_end(self.step)
        except (UserError, RunError):  # raised on all ranks
            self.checkpoints.save_at_stop(self)
            raise

    def run_step(self) -> bool:
        """Run the next step and its scheduled evaluation, export and checkpoint. Returns True if any rank must stop."""
        self.step += 1
        export_error: UserError | RunError | None = None
        report = self.train_step(self.step)
        self.validator.after_step(self.step)
        try:
            self.exporter.after_step(self.step)
        except (UserError, RunError) as error:  # raised on all ranks
            export_error = error
        agreed = finish_step(self.job, self.step, report, writing=self.checkpoints.is_writing)
        self.metrics = report.last_metrics
        # Last, because a checkpoint includes the metrics of the step.
        self.checkpoints.after_step(self, save=agreed["save"], writing=agreed["writing"])
        if export_error is not None:
            self.checkpoints.save_at_stop(self)
            raise export_error
        return agreed["stop"]

    def start(self) -> None:
        """Run the evaluation of validation.at_start, if set, and start the progress display."""
        self.validator.evaluate_at_start(self.step)
        self.job.monitor.update_progress(self.step, samples=0)

    @abstractmethod
    def wait_for_data(self, step: int) -> bool:
        """Wait for the data of this step. Returns False if a rank gets a stop request before the data is ready."""

    @abstractmethod
    def train_step(self, step: int) -> StepReport:
        """Run all optimizer steps of training step `step`."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "metrics": dict(self.metrics),
            "nonfinite_in_a_row": self.nonfinite_limit.num_consecutive,
            "validator": self.validator.state_dict(),
            **self.extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.metrics = state["step"], state["metrics"]
        stored = state["nonfinite_in_a_row"]  # a number in checkpoints of older versions
        self.nonfinite_limit.num_consecutive = {DEFAULT_ADAPTER: stored} if isinstance(stored, int) else stored
        self.validator.load_state_dict(state["validator"])
        self.load_extra_state(state)

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """Return the subclass's additions to `state_dict`, as JSON values. All ranks must call this."""

    @abstractmethod
    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `extra_state`."""


def finish_step(job: CommonJob, step: int, report: StepReport, *, writing: bool) -> dict[str, bool]:
    """Log one line of metrics per optimizer step of training step `step`. All ranks must call this.

    writing: whether this rank is still writing its shard of a checkpoint.
    Returns {flag: whether it is set on any rank}. The flags are `stop` (stop requested), `save` (checkpoint requested)
    and `writing`.
    """
    first, *others = report.metrics_by_update
    work = job.pop_work()  # before the step time is read: the first call takes seconds
    local_times = job.timer.end_step()
    flags = {"save": job.stop_flag.take_save_request(), "stop": job.stop_flag.is_set, "writing": writing}
    largest = job.world.max_over_ranks({**local_times, **flags})  # maximum over ranks of times, memory and flags
    times = {name: largest[name] for name in local_times}
    speed = speed_metrics(job, work, report, times["time/step"])
    counts = job.pop_forward_counts()
    first_update = (step - 1) * job.run_sizes.updates_per_step + 1
    for update, metrics in enumerate([{**first, **times, **counts, **speed}, *others], first_update):
        job.monitor.log_scalars(update, metrics)
    values = report.last_metrics
    headline = next((m for m in HEADLINE_METRICS if m in values), None)
    notes = [f"{headline} {values[headline]:.4f}"] if headline else []
    job.monitor.update_progress(
        step, samples=report.num_samples, note=", ".join([*notes, speed_summary(job.world.device, {**times, **speed})])
    )
    return {name: largest[name] > 0 for name in flags}


def speed_metrics(job: CommonJob, work: FlopCount | None, report: StepReport, seconds: float) -> dict[str, float]:
    """Return the speed metrics of a training step: samples per second, tokens per second, TFLOP/s and MFU.

    TFLOP/s includes the recomputation of activations, MFU does not. MFU is omitted if the peak FLOP/s are unknown.
    work: FLOPs of this rank, or None if unknown. seconds: duration of the step.
    """
    metrics = {SAMPLES_PER_SECOND: report.num_samples / seconds}
    if report.num_tokens is not None:
        metrics[TOKENS_PER_SECOND] = report.num_tokens / seconds
    if work is None or work.required == 0:
        return metrics
    work_s = seconds * job.world.sp_size  # the ranks of a replica share the work of its forwards
    metrics[TFLOPS_PER_GPU] = (work.required + work.recomputed) / TERA / work_s
    peak = job.recipe.logging.peak_tflops or peak_tflops(job.world.device, DTYPES[job.recipe.model.dtype])
    return metrics if peak is None else metrics | {MFU: work.required / TERA / work_s / peak}


def speed_summary(device: torch.device, metrics: Mapping[str, float]) -> str:
    """Return a console summary such as `312 TFLOP/s per GPU, MFU 32 %, 61.2 GiB`. Unknown values are omitted."""
    parts = []
    if TFLOPS_PER_GPU in metrics and device.type != "cpu":
        parts.append(f"{metrics[TFLOPS_PER_GPU]:.3g} TFLOP/s per GPU")
    if MFU in metrics:
        parts.append(f"MFU {metrics[MFU]:.0%}")
    return ", ".join([*parts, f"{metrics[MEMORY_TAG]:.1f} GiB"])
