"""The spread of samples (mean distance between two samples of a prompt) is the same for any number of ranks."""

from types import SimpleNamespace

import pytest
import torch

from rl_cases import make_rollout
from wfm_ds.distributed.world import World
from wfm_ds.rollout.spread import MAX_ELEMENTS, measure_spread, select_elements
from wfm_ds.types import Prompt


def step_rollouts(latents, prompts, broken=()):
    local = [
        make_rollout(i, x, prompt=Prompt(id=prompt, text=prompt), is_finite=i not in broken)
        for i, (x, prompt) in enumerate(zip(latents, prompts, strict=True))
    ]
    return SimpleNamespace(samples=local, local_rollouts=local)


def measure(*arguments, **options):
    return measure_spread(World.single_process(), step_rollouts(*arguments, **options)).get("rollout/spread")


def test_it_is_the_mean_rms_difference_of_pairs_with_the_same_prompt():
    latents = [torch.full((2, 3, 3), float(value)) for value in (0, 1, 3, 10, 10)]
    assert measure(latents, ["a", "a", "a", "b", "b"]) == pytest.approx((1 + 3 + 2 + 0) / 4)
    assert measure(latents, ["a", "b", "c", "d", "d"]) == 0
    assert measure(latents, ["a", "b", "c", "d", "e"]) is None
    assert measure(latents, ["a", "a", "a", "b", "b"], broken=[2, 4]) == pytest.approx(1)


def test_normal_noise_has_the_spread_root_two_also_if_only_some_elements_are_compared():
    noise = torch.randn(4, 16, 4, 32, 33, generator=torch.Generator().manual_seed(0))
    assert measure(noise, ["a"] * 4) == pytest.approx(2**0.5, rel=0.02)


def test_elements_are_evenly_spaced_over_the_whole_sample():
    chosen = select_elements(torch.arange(2.5 * MAX_ELEMENTS))
    assert len(chosen) <= MAX_ELEMENTS
    assert chosen.tolist()[:3] == [0, 3, 6]
    assert chosen[-1] > 2.5 * MAX_ELEMENTS - 4


class TwoReplicas:
    """World of the first of two replicas; the other replica has `others`."""

    def __init__(self, others):
        self.others = others

    def gather_from_leaders(self, rows):
        return [rows, self.others]


def test_samples_of_a_prompt_on_different_ranks_are_compared():
    latents = torch.randn(4, 2, 3, 3)
    together = step_rollouts(latents, ["a", "a", "b", "a"])
    packed = []
    measure_spread(SimpleNamespace(gather_from_leaders=lambda rows: [packed.extend(rows) or rows]), together)
    first = SimpleNamespace(samples=together.samples, local_rollouts=together.local_rollouts[:2])
    assert measure_spread(TwoReplicas(packed[2:]), first) == measure_spread(World.single_process(), together)
