"""Number of collectives that wfm_ds calls per step, not counting DeepSpeed's. A single rank calls none."""

import contextlib
import sys
from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank

EXCHANGES = ("all_reduce", "all_gather", "broadcast", "gather", "barrier", "reduce")


def exchanges_of_steps(recipe, overrides):
    """Count the torch.distributed calls of wfm_ds, not of DeepSpeed, between the starts of consecutive steps."""
    import torch.distributed as dist

    from wfm_ds.training.rl import RlLoop
    from wfm_ds.training.sft import SftLoop

    calls, seen = Counter(), []

    def counted(name, original):
        def call(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("wfm_ds."):
                calls[name] += 1
            return original(*args, **kwargs)

        return call

    def marked(train_on):
        def begin(self, step):
            seen.append(calls.copy())
            return train_on(self, step)

        return begin

    with contextlib.ExitStack() as patches:
        for name in EXCHANGES:
            patches.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        for loop in (SftLoop, RlLoop):
            patches.enter_context(mock.patch.object(loop, "train_step", marked(loop.train_step)))
        train_on_rank(recipe, overrides)
    return [dict(after - before) for before, after in pairwise(seen)]


@pytest.fixture
def recipe(tiny_pipelines, digits, tmp_path):
    words = [
        *("run.steps=3", "checkpoint.every=0", "validation.every=0", "validation.at_start=false"),
        *("validation.num_prompts=1", "validation.num_images=1", "logging.console=false", "logging.sample_every=0"),
    ]
    return tiny_recipe("sd3_sft", tmp_path / "run", tiny_pipelines("sd3"), *words, data=digits)


def test_a_single_rank_calls_no_collectives(one_rank, recipe):
    assert one_rank.run(exchanges_of_steps, **recipe) == [[{}, {}]]


def test_a_step_of_two_ranks_has_four_collectives(two_ranks, recipe):
    """Four collectives per step: file errors, losses, bad files, and the end of the step (times, stop, save, writing).
    The first step also compares which parameters got no gradient."""
    assert two_ranks.run(exchanges_of_steps, **recipe) == [[{"all_reduce": 5}, {"all_reduce": 4}]] * 2
