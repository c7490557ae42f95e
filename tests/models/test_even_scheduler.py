"""Schedulers whose steps are at even noise levels: against the formula, in float64."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from each_case import check_each
from wfm_ds.models.even_scheduler import build_even_scheduler, even_levels, find_even_shift
from wfm_ds.models.noise_schedule import read_sigmas


@check_each("shift", [0.3, 1.0, 1.5, 3.0, 5.0, 12.0])
def test_a_scheduler_has_the_shifted_even_levels(shift):
    for num_steps in (1, 2, 3, 4, 8, 50):
        scheduler = build_even_scheduler(shift, num_steps, 1000)
        q = torch.arange(num_steps, -1, -1, dtype=torch.float64) / num_steps
        want = shift * q / (1 + (shift - 1) * q)
        torch.testing.assert_close(read_sigmas(scheduler, num_steps, {}), want, rtol=0, atol=1e-6)
        scheduler.set_timesteps(num_steps)
        torch.testing.assert_close(scheduler.timesteps.double(), 1000 * want[:-1], rtol=0, atol=1e-3)
        assert even_levels(num_steps) == q[:-1].tolist()
        if num_steps > 1:
            assert find_even_shift(scheduler.config, num_steps) == pytest.approx(shift, rel=1e-9)
            assert find_even_shift(scheduler.config, num_steps + 1) is None


def test_no_scheduler_has_many_steps_with_a_large_shift():
    assert build_even_scheduler(30.0, 50, 1000) is None
    other = FlowMatchEulerDiscreteScheduler(shift=3.0, shift_terminal=0.02)
    assert [find_even_shift(other.config, num_steps) for num_steps in (1, 4)] == [None, None]
