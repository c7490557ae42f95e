"""The frame of both training loops: all that happens around a step. What a step trains on is the child's matter."""

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
    """The evaluations of a loop at their times (validation.py). Every rank calls every method at the same step."""

    def at_start(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...

    def at_end(self, step: int) -> dict[str, float]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Loop(ABC):
    """Trains `job.engine`, step by step. Every rank calls every method at the same place."""

    job: CommonJob
    validator: Evaluation

    def __init__(self, job: CommonJob, validator: Evaluation, exporter: Exporter, checkpoints: Checkpoints) -> None:
        self.job, self.validator, self.exporter, self.checkpoints = job, validator, exporter, checkpoints
        self.meter, self.finite = Meter(), FiniteSteps()
        self.step = 0  # the last one done, or under way
        self.metrics: Mapping[str, float] = {}  # of the last step done

    def run(self) -> Outcome:
        """`train`, then export the last weights and, if all steps are done, evaluate them."""
        try:
            outcome = self.train()
        except RunError:  # raised on all ranks alike; the weights are those of the last good step
            self.keep()
            raise
        self.keep()
        # Who asks a run to stop does not wait for an evaluation.
        evaluation = self.validator.at_end(outcome.step) if outcome.status == "finished" else {}
        result = self.job.recipe.run.output_dir / "result.json"
        self.job.monitor.message(f"{outcome.status} at step {outcome.step}; result in {result}")
        outcome = replace(outcome, metrics={**outcome.metrics, **evaluation})
        self.job.monitor.ended(outcome.status, outcome.metrics)
        return outcome

    def keep(self) -> None:
        """Complete the checkpoint that is under way, and export the weights."""
        self.checkpoints.finish()
        self.exporter.at_end(self.step)

    def train(self) -> Outcome:
        """Train to the recipe's last step, or until a rank is asked to stop; then save and say `preempted`."""
        job = self.job
        self.begin()
        stop, is_first = job.should_stop(), True
        while self.step < job.recipe.run.steps:
            if stop or not self.wait(self.step + 1):
                self.checkpoints.at_stop(self)
                return Outcome("preempted", self.step, self.metrics)
            stop = self.advance()
            if is_first:
                job.monitor.message(f"the first step was done {seconds_since_start():.0f} s after the start")
            is_first = False
        return Outcome("finished", self.step, self.metrics)

    def advance(self) -> bool:
        """Do the next step and all that is due after it. True if a rank is asked to stop."""
        self.step += 1
        report = self.train_on(self.step)
        self.validator.after_step(self.step)
        self.exporter.after_step(self.step)
        agreed = finish_step(self.job, self.step, report, writing=self.checkpoints.is_writing)
        self.metrics = report.last
        self.checkpoints.after_step(self, agreed)  # last: the step's metrics belong to it
        return agreed.stop

    def begin(self) -> None:
        """Evaluate the weights of the start where the recipe asks for it, and start the clocks."""
        self.validator.at_start(self.step)
        self.job.monitor.progress(self.step, samples=0)

    @abstractmethod
    def wait(self, step: int) -> bool:
        """Return once what this step trains on can be had; False if a rank is asked to stop before."""

    @abstractmethod
    def train_on(self, step: int) -> StepReport:
        """Do the optimizer steps of this step."""

    def state(self) -> dict[str, Any]:
        """Everything that the next step and its metrics depend on besides the engine, as JSON; equal on every rank."""
        return {
            "step": self.step,
            "metrics": dict(self.metrics),
            "nonfinite_in_a_row": self.finite.in_a_row,
            "validator": self.validator.state(),
            **self.own_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.step, self.metrics = state["step"], state["metrics"]
        self.finite.in_a_row = state["nonfinite_in_a_row"]
        self.validator.restore(state["validator"])
        self.restore_own(state)

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The child's part of `state`. Collective."""

    @abstractmethod
    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Take up the child's part of `state`."""
