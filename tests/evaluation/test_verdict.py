"""Verdicts: a reward that rises while judges fall is being fooled, and a judge's noise is no fall."""

import numpy as np
import pytest

from wfm_ds.evaluation.paired import difference
from wfm_ds.evaluation.verdict import judge

RNG = np.random.default_rng(0)
BASE = RNG.normal(size=(20, 4))
NOISE = RNG.normal(size=(20, 4))


def moved(by):
    return difference(BASE, BASE + by + 0.3 * NOISE)


UP, DOWN, STILL = moved(0.5), moved(-0.5), difference(BASE, BASE + 0.3 * (NOISE - NOISE.mean()))


@pytest.mark.parametrize(
    ("total", "judges", "related", "name"),
    [
        (UP, {"a": UP, "b": DOWN}, (), "hacked"),
        (UP, {"a": UP, "b": STILL}, (), "improved"),
        (UP, {"a": STILL}, (), "unconfirmed"),
        (UP, {"a": UP}, ("a",), "unconfirmed"),
        (UP, {"a": UP, "b": UP}, ("a",), "improved"),
        (UP, {"a": DOWN}, ("a",), "hacked"),
        (STILL, {"a": UP}, (), "no gain"),
        (DOWN, {"a": DOWN}, (), "no gain"),
        (UP, {}, (), "cannot tell"),
        (None, {"a": UP}, (), "cannot tell"),
        (difference(BASE[:4], BASE[:4] + 1), {"a": UP}, (), "cannot tell"),
    ],
)
def test_the_verdict_follows_from_total_and_judges(total, judges, related, name):
    assert judge("reward", total, judges, related=related).name == name


def test_the_sentence_names_who_fell_by_how_much():
    found = judge("pickscore", UP, {"ocr": DOWN, "hps": UP})
    assert list(found.fell) == ["ocr"]
    assert "pickscore increased, but ocr decreased by 0." in found.sentence
    assert found.sentence.endswith("(Holm over 2 held-out rewards)")


def test_a_fall_that_is_certain_and_too_small_to_see_is_none():
    small = difference(BASE, BASE - 0.05)
    assert small.p_fell < 1e-6
    assert judge("reward", UP, {"a": small, "b": UP}).name == "improved"
