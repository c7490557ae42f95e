"""The limit on consecutive optimizer steps with a non-finite loss."""

import math

import pytest

from wfm_ds.engine.optimizer_steps import MAX_NONFINITE_STEPS, NonFiniteLimit, StepResult
from wfm_ds.errors import RunError

APPLIED = StepResult(is_applied=True, grad_norm=1.0, is_clipped=False, lr=0.1, num_skipped=0)
SKIPPED = StepResult(is_applied=False, grad_norm=math.nan, is_clipped=False, lr=0.1, num_skipped=1)


def test_steps_of_another_adapter_do_not_reset_the_count_of_skipped_steps():
    limit = NonFiniteLimit()
    for _ in range(MAX_NONFINITE_STEPS - 1):
        limit.check(APPLIED, ["a"], "fake")
        limit.check(SKIPPED, ["a"])
    limit.check(APPLIED, ["a"], "fake")
    with pytest.raises(RunError, match=f"{MAX_NONFINITE_STEPS} consecutive optimizer steps had a non-finite loss"):
        limit.check(SKIPPED, ["a"])
