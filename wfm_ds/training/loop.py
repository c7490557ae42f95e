"""Base class of the training loops: evaluation, export, checkpoints and shutdown around each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from wfm_ds.distributed.lifecycle import seconds_since_start
from wfm_ds.errors import RunError, UserError
from wfm_ds.monitoring.meters import Meter
from wfm_ds.runs.job import CommonJob
from wfm_ds.runs.result import RunOutcome
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.step_report import NonFiniteLimit, StepReport, finish_step


class PeriodicEvaluator(Protocol):
    """Interface of the evaluation during training. All methods are collective."""

    def evaluate_at_start(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def evaluate_at_end(self, step: int) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TrainingLoop(ABC):
    """Trains `job.engine` step by step. All methods are collective.

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

        After the last step the final weights are evaluated. After a stop request they are not. Raises RunError, without
        an export, if no optimizer step was applied.
        """
        try:
            outcome = self.train_steps()
        except RunError:  # raised on all ranks; the weights of the last good step are still valid
            self.save_results()
            raise
        if outcome.status == "finished" and self.job.engine.num_updates == 0:
            raise RunError(
                f"nothing was trained and nothing is exported: no optimizer step was applied in {outcome.step} steps. "
                f"The warnings in {self.job.recipe.run.output_dir / 'logs' / 'rank_0.log'} say why"
            )
        self.save_results()
        # Do not delay a requested stop by an evaluation.
        evaluation = self.validator.evaluate_at_end(outcome.step) if outcome.status == "finished" else {}
        result = self.job.recipe.run.output_dir / "result.json"
        self.job.monitor.log_message(f"{outcome.status} at step {outcome.step}; result in {result}")
        outcome = replace(outcome, metrics={**outcome.metrics, **evaluation})
        self.job.monitor.set_outcome(outcome.status, outcome.metrics)
        return outcome

    def save_results(self) -> None:
        """Wait until the last checkpoint is complete, then export the current weights."""
        self.checkpoints.wait_for_save()
        try:
            self.exporter.export_at_end(self.step)
        except UserError:  # raised on all ranks
            self.checkpoints.save_at_stop(self)
            raise

    def train_steps(self) -> RunOutcome:
        """Train until the last step or a stop request.

        After the last step the outcome has the status `finished`. After a stop request the loop saves a checkpoint and
        the outcome has the status `preempted`.
        """
        job = self.job
        self.start()
        stop, is_first = job.should_stop(), True
        while self.step < job.recipe.run.steps:
            if stop or not self.wait_for_data(self.step + 1):
                self.checkpoints.save_at_stop(self)
                return RunOutcome("preempted", self.step, self.metrics)
            stop = self.run_step()
            if is_first:
                job.monitor.log_message(f"first step completed {seconds_since_start():.0f} s after the start")
            is_first = False
        return RunOutcome("finished", self.step, self.metrics)

    def run_step(self) -> bool:
        """Run the next step and its scheduled evaluation, export and checkpoint.

        Returns True if any rank must stop.
        """
        self.step += 1
        report = self.train_step(self.step)
        self.validator.after_step(self.step)
        export_error = self.try_export()
        agreed = finish_step(self.job, self.step, report, writing=self.checkpoints.is_writing)
        self.metrics = report.last_metrics
        self.checkpoints.after_step(self, agreed)  # last, because a checkpoint includes the metrics of the step
        if export_error is not None:
            self.checkpoints.save_at_stop(self)
            raise export_error
        return agreed.stop

    def try_export(self) -> UserError | None:
        """Export the weights if the recipe schedules an export for this step.

        Returns the error of a failed export, else None. The result is identical on every rank.
        """
        try:
            self.exporter.after_step(self.step)
        except UserError as error:
            return error
        return None

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
        """Return the loop's state as JSON values, without the engine's state. Collective.

        The result is identical on every rank.
        """
        return {
            "step": self.step,
            "metrics": dict(self.metrics),
            "nonfinite_in_a_row": self.nonfinite_limit.num_consecutive,
            "validator": self.validator.state_dict(),
            **self.extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.metrics = state["step"], state["metrics"]
        self.nonfinite_limit.num_consecutive = state["nonfinite_in_a_row"]
        self.validator.load_state_dict(state["validator"])
        self.load_extra_state(state)

    @abstractmethod
    def extra_state(self) -> dict[str, Any]:
        """Return the subclass's additions to `state_dict`, as JSON values. Collective."""

    @abstractmethod
    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `extra_state`."""
