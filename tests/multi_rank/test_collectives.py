"""Number of collectives that wfm_ds calls per step, not counting DeepSpeed's. A single rank calls none."""

import sys
from collections import Counter
from itertools import pairwise

import pytest

from multi_rank.resuming import tiny_recipe, train_on_rank

EXCHANGES = ("all_reduce", "all_gather", "broadcast", "gather", "barrier", "reduce")


def exchanges_of_steps(recipe, overrides):
    """Count the torch.distributed calls of wfm_ds, not of DeepSpeed, between the starts of consecutive steps."""
    import torch.distributed as dist

    from wfm_ds.training.rl import RlLoop
    from wfm_ds.training.sft import SftLoop

    calls, seen, originals = Counter(), [], {name: getattr(dist, name) for name in EXCHANGES}

    def counted(name):
        def call(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("wfm_ds."):
                calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    def marked(loop):
        train_on = loop.train_step

        def begin(self, step):
            seen.append(calls.copy())
            return train_on(self, step)

        return train_on, begin

    loops = {loop: marked(loop) for loop in (SftLoop, RlLoop)}
    for name in EXCHANGES:
        setattr(dist, name, counted(name))
    for loop, (_, begin) in loops.items():
        loop.train_step = begin
    try:
        train_on_rank(recipe, overrides)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        for loop, (train_on, _) in loops.items():
            loop.train_step = train_on
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
