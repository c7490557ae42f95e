"""How many exchanges of our own a step costs: one for all flags and times together, none for a rank alone."""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from multi_rank.resuming import train_on_rank

ROOT = Path(__file__).parent.parent.parent
EXCHANGES = ("all_reduce", "all_gather", "broadcast", "gather", "barrier", "reduce")


def exchanges_of_steps(recipe, overrides):
    """By step but the last: how often our code, not DeepSpeed's, called torch.distributed until the next step."""
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


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from wfm_ds.demos.digits_data import write_digits

    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder / "images"


@pytest.fixture
def overrides(tiny_pipelines, digits, tmp_path):
    return [
        f"run.output_dir={tmp_path / 'run'}",
        f"model.path={tiny_pipelines('sd3')}",
        f"data.path={digits}",
        *("run.steps=3", "checkpoint.every=0", "validation.every=0", "validation.at_start=false"),
        *("validation.num_prompts=1", "validation.num_images=1", "logging.console=false", "logging.sample_every=0"),
    ]


def test_a_rank_alone_exchanges_nothing(one_rank, overrides):
    recipe = str(ROOT / "tests" / "recipes" / "sd3_sft.yaml")
    assert one_rank.run(exchanges_of_steps, recipe=recipe, overrides=overrides) == [[{}, {}]]


def test_a_step_of_two_ranks_agrees_on_all_flags_at_once(two_ranks, overrides):
    """Was a file readable; the losses; the bad files; and the end of the step: times, stop, save, writing. The first
    also which parameters no gradient reached."""
    recipe = str(ROOT / "tests" / "recipes" / "sd3_sft.yaml")
    assert (
        two_ranks.run(exchanges_of_steps, recipe=recipe, overrides=overrides)
        == [[{"all_reduce": 5}, {"all_reduce": 4}]] * 2
    )
