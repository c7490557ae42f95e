"""Rank correlations of rewards; whole-run tests cover the evaluations."""

import contextlib
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from wfm_ds.distributed import progress
from wfm_ds.training.validation import Validator, partial_scores
from wfm_ds.training.validation_metrics import correlation_metrics, rank_correlation
from wfm_ds.types import Prompt, Score

FEW = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12)


@given(FEW)
def test_rank_correlation_equals_spearmans_with_ties(pairs):
    first, second = zip(*pairs, strict=True)
    found = rank_correlation(pairs)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)


def test_rank_correlation_depends_only_on_the_order():
    values = np.linspace(-1, 2, 7)
    assert rank_correlation(list(zip(values, np.exp(values), strict=True))) == pytest.approx(1)
    assert rank_correlation(list(zip(values, -np.exp(values), strict=True))) == pytest.approx(-1)
    assert rank_correlation([(1.0, 2.0)]) is None


def scores(*values):
    failure = {True: "broken", False: None}
    return [{"f": Score(sample_id="id", reward="f", value=v, failure=failure[v is None])} for v in values]


def test_prompts_of_different_difficulty_correlate_even_where_samples_of_one_do_not():
    """The two orders are opposite within each prompt; a pooled correlation hides this."""
    evaluated, rolled_out = scores(0.0, 1.0, 10.0, 11.0), scores(1.0, 0.0, 11.0, 10.0)
    metrics = correlation_metrics(evaluated, rolled_out, ["a", "a", "b", "b"])
    assert metrics["val/reward/f/rank_correlation"] == pytest.approx(0.6)
    assert metrics["val/reward/f/rank_correlation_within_prompts"] == pytest.approx(-1)
    assert metrics["val/reward/f/rollout_mean"] == 5.5


def test_samples_that_failed_on_either_side_and_prompts_without_a_difference_are_left_out():
    evaluated, rolled_out = scores(0.0, None, 1.0, 5.0, 5.0, 3.0), scores(0.0, 9.0, 2.0, 1.0, 2.0, None)
    metrics = correlation_metrics(evaluated, rolled_out, ["a", "a", "a", "b", "b", "b"])
    assert metrics["val/reward/f/rank_correlation_within_prompts"] == pytest.approx(1)
    assert metrics["val/reward/f/rollout_mean"] == 1.25
    assert correlation_metrics(scores(None), scores(1.0), ["a"]) == {}


def test_partial_scores_are_named_like_their_metrics():
    failed = Score(sample_id="id", reward="g", failure="broken")
    found = partial_scores(
        {"f": Score(sample_id="id", reward="f", value=1.0, parts={"x": 0.5, "y": 0.25}), "g": failed}
    )
    assert found == {"f/x": 0.5, "f/y": 0.25}


def test_a_long_validation_shows_that_it_still_runs_and_its_remaining_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    validation = Validator.__new__(Validator)
    engine = SimpleNamespace(use_policy=lambda policy: contextlib.nullcontext())
    sampler = SimpleNamespace(evaluation_plan=lambda: None)
    validation.job = SimpleNamespace(
        timer=lambda name: contextlib.nullcontext(), engine=engine, evaluation_policy="ema", sampler=sampler
    )
    validation.job.world = SimpleNamespace(dp_size=2, dp_rank=0, is_leader=False)
    validation.job.recipe = SimpleNamespace(
        logging=SimpleNamespace(num_samples=1), engine=SimpleNamespace(max_forward_batch=1)
    )
    validation.samples = SimpleNamespace(layout=SimpleNamespace(join=list), frames=None, recordings=None)
    validation.items = [(Prompt(id=str(i), text="a cup"), i) for i in range(6)]
    validation.num_clips, validation.scorers, validation.recordings, validation.rollout_plan = 1, [], None, None

    def wait_for(text):
        shown, deadline_s = "", time.monotonic() + 10
        while text not in shown:
            assert time.monotonic() < deadline_s, shown
            shown += capsys.readouterr().err

    def measure_loss():
        wait_for("computing the validation loss: 0:00 so far")
        raise KeyboardInterrupt

    waits = iter(["0 of 3\n", "1 of 3, 0:00 left\n", "2 of 3, 0:00 left\n"])  # the other rank generates 3 others

    def generate(*_, **__):
        wait_for(f"generating validation samples: {next(waits)}")
        yield SimpleNamespace(pixels=np.zeros((1, 2, 2, 3), np.uint8), sound=None)

    monkeypatch.setattr("wfm_ds.training.validation.generate_clips", generate)
    validation.loss = SimpleNamespace(measure_loss=measure_loss)
    with pytest.raises(KeyboardInterrupt):
        validation.evaluate(0)
