"""Optimizer steps of a DeepSpeed engine, for one adapter at a time, with their schedules and a limit on failed ones."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.distributed.world import World
from wfm_ds.engine.policies import Adapters
from wfm_ds.engine.shards import Shards
from wfm_ds.engine.step_checks import GradientWatch
from wfm_ds.errors import RunError
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.sections import OptimizerRecipe
from wfm_ds.types import DEFAULT_ADAPTER

log = logging.getLogger(__name__)

MAX_NONFINITE_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of an optimizer step. All ranks get equal values."""

    # False if a gradient was not finite on some rank, or if there were no loss terms. No rank changed its weights then.
    is_applied: bool
    grad_norm: float  # norm of the gradient over all ranks, before clipping; NaN if the step was not applied
    is_clipped: bool
    lr: float  # learning rate of this step, also if it was not applied
    num_skipped: int  # optimizer steps that the run has skipped so far, over all adapters

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the metrics of the step. prefix: text before the names of the metrics of one adapter."""
        return {
            f"optim/{prefix}grad_norm": self.grad_norm,
            f"optim/{prefix}clipped": float(self.is_clipped),
            f"optim/{prefix}lr": self.lr,
            "optim/skipped_steps": float(self.num_skipped),
        }


class NonFiniteLimit:
    """Stops the run if the loss or gradient of an adapter is non-finite in MAX_NONFINITE_STEPS consecutive steps."""

    def __init__(self) -> None:
        self.num_consecutive: dict[str, int] = {}  # by adapter

    def check(self, result: StepResult, sample_ids: Sequence[str], adapter: str = DEFAULT_ADAPTER) -> None:
        """Record an optimizer step.

        Raises RunError on all ranks after MAX_NONFINITE_STEPS consecutive non-finite steps.
        """
        count = 0 if result.is_applied else self.num_consecutive.get(adapter, 0) + 1
        self.num_consecutive[adapter] = count
        if not result.is_applied:
            log.warning(
                "step not applied: non-finite loss or gradient; samples of this rank: %s", ", ".join(sample_ids)
            )
        if count >= MAX_NONFINITE_STEPS:
            raise RunError(f"{count} consecutive optimizer steps had a non-finite loss or gradient: lower optimizer.lr")


class OptimizerSteps:
    """Optimizer steps of a DeepSpeed engine: loss scaling, learning rates, clipping and counters.

    A LoRA run can train several adapters in turn (`train_adapter`).
    """

    def __init__(
        self,
        ds: Any,
        recipe: Recipe,
        world: World,
        total_updates: int,
        adapters: Adapters | None,
        gradient_watches: Mapping[str, GradientWatch],
        optimizer_options: Mapping[str, OptimizerRecipe],
    ) -> None:
        """ds: result of deepspeed.initialize. adapters: None in full training.

        gradient_watches, optimizer_options: one entry per trained adapter; in full training, only `default`.
        """
        self.ds = ds
        self.recipe = recipe
        self.world = world
        self.accumulation = int(ds.gradient_accumulation_steps())
        self.total_updates = total_updates
        self.active_policy = "train"
        self.trained_adapter = DEFAULT_ADAPTER  # the adapter that the next optimizer step trains
        self.num_updates = 0  # updates of `default`, or of the model in full training
        self.adapter_updates = {name: 0 for name in optimizer_options if name != DEFAULT_ADAPTER}
        self.num_skipped = 0  # skipped steps of all adapters
        self.shards = Shards(ds)
        self.extra_shards = {name: Shards(ds, name) for name in self.adapter_updates}
        self._adapters = adapters
        self._gradient_watches = gradient_watches
        self._optimizer_options = optimizer_options
        self._is_using_policy = False  # inside DenoiserEngine.use_policy
        self._num_backwards = 0  # backward passes since the last step
        self._expected_backwards = self.accumulation

    @contextlib.contextmanager
    def train_adapter(self, name: str) -> Iterator[None]:
        """Train the adapter `name` (`default` or an extra adapter) inside the context.

        All other adapters stay unchanged.

        All ranks must enter and leave the context together, between optimizer steps. The context cannot be nested, but
        it may contain `use_policy`.
        """
        self._require_trained_policy(f"train_adapter({name!r})")
        if self.trained_adapter != DEFAULT_ADAPTER or self._num_backwards:
            raise RuntimeError(
                f"train_adapter({name!r}) while {self.trained_adapter} trains, after {self._num_backwards} backward "
                "passes of its step"
            )
        if name == DEFAULT_ADAPTER:
            yield
            return
        if name not in self.adapter_updates:
            raise ValueError(f"{name} is not a trained adapter: {' '.join([DEFAULT_ADAPTER, *self.adapter_updates])}")
        self._select_trained_adapter(name)
        try:
            yield
            if self._num_backwards:
                raise RuntimeError(f"call step() in train_adapter({name!r}): its backward passes are done")
        finally:
            self._select_trained_adapter(DEFAULT_ADAPTER)

    def _select_trained_adapter(self, name: str) -> None:
        assert self._adapters is not None
        self._adapters.activate(name)
        self.ds.optimizer.optimizer.active_adapter = name
        self.trained_adapter, self.active_policy = name, "train" if name == DEFAULT_ADAPTER else name

    def expect_backwards(self, num_backwards: int) -> None:
        """Set the number of backward passes of the next optimizer step.

        All ranks must call this before the first of them.
        """
        if num_backwards < 1 or self._num_backwards:
            raise RuntimeError(
                f"cannot expect {num_backwards} backward passes: {self._num_backwards} of the step are done"
            )
        self._expected_backwards = num_backwards

    def backward(self, loss_sum: Tensor, num_terms: int) -> None:
        """Back-propagate the loss of one micro-step. All ranks must call this.

        loss_sum: sum of this rank's loss terms in this micro-step, fp32 scalar, equal on the ranks of a replica.
        num_terms: number of valid loss terms of the optimizer step over all replicas and micro-steps, at least 1. The
        optimizer step uses the gradient of the mean over these terms. For a step without loss terms, call `skip_step`
        instead.
        """
        self._require_trained_policy("backward")
        if loss_sum.ndim != 0:
            raise ValueError(f"loss_sum must be a scalar, got shape {tuple(loss_sum.shape)}")
        if num_terms < 1:
            raise ValueError(f"a step with {num_terms} terms has no gradient: call skip_step()")
        if self._num_backwards == self._expected_backwards:
            raise RuntimeError(
                f"call step() first: all {self._expected_backwards} backward passes of the optimizer step are done"
            )
        self._num_backwards += 1
        LIVENESS.start_operation("a backward pass of the denoiser")
        last = self._num_backwards == self._expected_backwards
        self.ds.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks and divides by its configured number of micro-steps, even if the actual number
        # differs. Multiply by both to undo this. The ranks of a replica hold partial sums of one gradient, so the first
        # factor is the number of ranks, not of replicas.
        scale = self.world.size * self.accumulation / num_terms
        self.ds.backward(loss_sum * scale)
        if not last:
            self.ds.step()  # only counts the micro-step

    def step(self) -> StepResult:
        """Update the weights after all backward passes of the step. All ranks must call this.

        If a gradient is not finite on any rank, no rank changes its weights. Raises ModelError if a trained parameter
        received no gradient.
        """
        self._require_trained_policy("step")
        if self._num_backwards != self._expected_backwards:
            raise RuntimeError(f"step() after {self._num_backwards} of {self._expected_backwards} backward passes")
        self._num_backwards, self._expected_backwards = 0, self.accumulation
        gradient_watch = self._gradient_watches[self.trained_adapter]
        if gradient_watch.watched:
            gradient_watch.check_gradients(self.world)
        LIVENESS.start_operation("an optimizer step")
        lr = self._next_learning_rate()
        for group in self.ds.optimizer.param_groups:  # the groups of other adapters are not stepped
            group["lr"] = lr
        self.ds.step()
        self.shards.zero_gradients()
        if not self.ds.was_step_applied():
            return self._record_skip(lr)
        if self.trained_adapter == DEFAULT_ADAPTER:
            self.num_updates += 1
        else:
            self.adapter_updates[self.trained_adapter] += 1
        grad_norm, bound = float(self.ds.get_global_grad_norm()), self.recipe.engine.max_grad_norm
        return StepResult(
            is_applied=True,
            grad_norm=grad_norm,
            is_clipped=0 < bound < grad_norm,
            lr=lr,
            num_skipped=self.num_skipped,
        )

    def skip_step(self) -> StepResult:
        """Skip an optimizer step without loss terms. All ranks must call this instead of `backward` and `step`."""
        self._require_trained_policy("skip_step")
        if self._num_backwards:
            raise RuntimeError(f"skip_step() after {self._num_backwards} backward passes of a step")
        return self._record_skip(self._next_learning_rate())

    def _record_skip(self, lr: float) -> StepResult:
        self.num_skipped += 1
        return StepResult(is_applied=False, grad_norm=math.nan, is_clipped=False, lr=lr, num_skipped=self.num_skipped)

    def _next_learning_rate(self) -> float:
        name = self.trained_adapter
        num_updates = self.adapter_updates.get(name, self.num_updates)
        return learning_rate(self._optimizer_options[name], num_updates + 1, self.total_updates)

    def _require_trained_policy(self, what: str) -> None:
        if self._is_using_policy:
            raise RuntimeError(
                f"{what} inside use_policy({self.active_policy!r}): the weights of another policy are in use"
            )


def learning_rate(recipe: OptimizerRecipe, update: int, total_updates: int) -> float:
    """Return the learning rate of optimizer step `update`, from 1 to total_updates.

    The schedules are those of diffusers.optimization.get_scheduler. The rate rises linearly from 0 in update 1 to lr in
    update warmup_steps + 1. The linear and cosine schedules then decay to final_lr_fraction * lr in update
    total_updates + 1.
    """
    done, warmup = update - 1, recipe.warmup_steps
    if done < warmup:
        return recipe.lr * done / warmup
    progress = min(1.0, (done - warmup) / max(total_updates - warmup, 1))
    falling = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}
    floor = 1.0 if recipe.schedule == "constant" else recipe.final_lr_fraction
    return recipe.lr * (floor + (1.0 - floor) * falling[recipe.schedule])


def ema_decay(largest: float, update: int) -> float:
    """Return the EMA decay for optimizer step `update`, counted from 1: min((1 + update) / (10 + update), largest)."""
    return min((1 + update) / (10 + update), largest)
