"""Verdicts: a rising reward with falling held-out rewards is reward hacking, but noise in held-out rewards is not a
fall."""

import numpy as np

from each_case import check_each
from wfm_ds.evaluation.paired_statistics import compare_scores
from wfm_ds.evaluation.results import decide_verdict

RNG = np.random.default_rng(0)
BASE = RNG.normal(size=(20, 4))
NOISE = RNG.normal(size=(20, 4))


def moved(by):
    return compare_scores(BASE, BASE + by + 0.3 * NOISE)


UP, DOWN, STILL = moved(0.5), moved(-0.5), compare_scores(BASE, BASE + 0.3 * (NOISE - NOISE.mean()))


@check_each(
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
        (compare_scores(BASE[:4], BASE[:4] + 1), {"a": UP}, (), "cannot tell"),
    ],
)
def test_the_verdict_depends_on_the_total_and_the_held_out_rewards(total, judges, related, name):
    assert decide_verdict("reward", total, judges, related=related).name == name


def test_the_verdict_names_each_falling_reward_and_its_change():
    found = decide_verdict("pickscore", UP, {"ocr": DOWN, "hps": UP})
    assert list(found.decreases) == ["ocr"]
    assert "pickscore increased, but ocr decreased by 0." in found.message
    assert found.message.endswith("(Holm over 2 held-out rewards)")


def test_a_significant_but_tiny_fall_does_not_count():
    small = compare_scores(BASE, BASE - 0.05)
    assert small.p_decrease < 1e-6
    assert decide_verdict("reward", UP, {"a": small, "b": UP}).name == "improved"
