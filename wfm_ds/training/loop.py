"""Base class of the training loops: evaluation, export, checkpoints and shutdown around each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from wfm_ds.distributed.lifecycle import seconds_since_start
from wfm_ds.errors import RunError
from wfm_ds.monitoring.meter import Meter
from wfm_ds.run.job import CommonJob
from wfm_ds.run.result import Outcome
from wfm_ds.training.checkpoints import Checkpoints
from wfm_ds.training.exporter import Exporter
from wfm_ds.training.outcome import FiniteSteps, StepReport, finish_step


class Evaluation(Protocol):
    """Evaluations during training (see validation.py). Every rank must call every method at the same step."""

    def at_start(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def at_end(self, step: int) -> dict[str, float]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Loop(ABC):
    """Trains `job.engine` step by step. Every rank must call every method in the same order.

    Subclasses define the data and the loss of a step.
    """

    job: CommonJob
    validator: Evaluation

    def __init__(self, job: CommonJob, validator: Evaluation, exporter: Exporter, checkpoints: Checkpoints) -> None:
        self.job, self.validator, self.exporter, self.checkpoints = job, validator, exporter, checkpoints
        self.meter, self.finite = Meter(), FiniteSteps()
        self.step = 0  # the last completed step, or the current one
        self.metrics: Mapping[str, float] = {}  # metrics of the last completed step

    def run(self) -> Outcome:
        """Train, export the final weights and, if all steps are done, evaluate them."""
        try:
            outcome = self.train()
        except RunError:  # raised on all ranks; the weights of the last good step are still valid
            self.keep()
            raise
        self.keep()
        # Do not delay a requested stop by an evaluation.
        evaluation = self.validator.at_end(outcome.step) if outcome.status == "finished" else {}
        result = self.job.recipe.run.output_dir / "result.json"
        self.job.monitor.message(f"{outcome.status} at step {outcome.step}; result in {result}")
        outcome = replace(outcome, metrics={**outcome.metrics, **evaluation})
        self.job.monitor.ended(outcome.status, outcome.metrics)
        return outcome

    def keep(self) -> None:
        """Complete a pending checkpoint and export the weights."""
        self.checkpoints.finish()
        self.exporter.at_end(self.step)

    def train(self) -> Outcome:
        """Train to the recipe's last step, or until any rank gets a stop request; then save and return `preempted`."""
        job = self.job
        self.begin()
        stop, is_first = job.should_stop(), True
        while self.step < job.recipe.run.steps:
            if stop or not self.wait(self.step + 1):
                self.checkpoints.at_stop(self)
                return Outcome("preempted", self.step, self.metrics)
            stop = self.advance()
            if is_first:
                job.monitor.message(f"first step completed {seconds_since_start():.0f} s after the start")
            is_first = False
        return Outcome("finished", self.step, self.metrics)

    def advance(self) -> bool:
        """Run the next step and everything scheduled after it. Returns True if any rank got a stop request."""
        self.step += 1
        report = self.train_on(self.step)
        self.validator.after_step(self.step)
        self.exporter.after_step(self.step)
        agreed = finish_step(self.job, self.step, report, writing=self.checkpoints.is_writing)
        self.metrics = report.last
        self.checkpoints.after_step(self, agreed)  # last, because a checkpoint includes the metrics of the step
        return agreed.stop

    def begin(self) -> None:
        """Run the evaluation at the start if the recipe has one, and start the progress display."""
        self.validator.at_start(self.step)
        self.job.monitor.progress(self.step, samples=0)

    @abstractmethod
    def wait(self, step: int) -> bool:
        """Wait for the data of this step. Returns False if any rank gets a stop request first."""

    @abstractmethod
    def train_on(self, step: int) -> StepReport:
        """Run the optimizer steps of this step."""

    def state(self) -> dict[str, Any]:
        """Return the JSON state needed to resume, except the engine's. Identical on every rank. Collective."""
        return {
            "step": self.step,
            "metrics": dict(self.metrics),
            "nonfinite_in_a_row": self.finite.in_a_row,
            "validator": self.validator.state(),
            **self.own_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.step, self.metrics = state["step"], state["metrics"]
        self.finite.in_a_row = state["nonfinite_in_a_row"]
        self.validator.restore(state["validator"])
        self.restore_own(state)

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return the subclass's part of the state. Collective."""

    @abstractmethod
    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Restore the subclass's part of the state."""
