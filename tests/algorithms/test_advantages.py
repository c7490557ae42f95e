import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.algorithms.advantages import (
    Rewards,
    combine_scores,
    compute_advantages,
    group_variance,
    reward_stats,
    reward_warnings,
    select_best_and_worst,
)
from wfm_ds.recipe.algorithms import RlSettings
from wfm_ds.recipe.sections import RewardFunction, RewardRecipe
from wfm_ds.types import Score

GROUPS, REWARDS = list("abacba"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def advantages(rewards, groups, transform=None, **settings):
    """Return the advantages for rewards given as numbers, or as tuples of several rewards with `weights`."""
    weights = settings.pop("weights", (1.0,))
    parts = [r if r is None or isinstance(r, tuple) else (r,) for r in rewards]
    totals = [None if p is None else sum(w * x for w, x in zip(weights, p, strict=True)) for p in parts]
    settings = RlSettings(**{"name": "any", "advantage_std": "group"} | settings)
    return compute_advantages(
        Rewards(totals, parts, weights, {}),
        groups,
        settings,
        num_selected=settings.num_selected,
        drops_zero_std=settings.drops_zero_std,
        transform=transform,
    )


def rewards_of(scores, functions, **recipe):
    return combine_scores(scores, RewardRecipe(functions=functions, **recipe))


def scored(sample_id="s", seconds=0.0, **values):
    """Return {reward: Score} for one sample; None is a failed reward."""
    return {
        name: Score(sample_id=sample_id, reward=name, seconds=seconds, value=v, failure="broken" if v is None else None)
        for name, v in values.items()
    }


@check_each(
    ("std", "want"),
    [
        ("group", [-1.135495, -0.999933, -0.162214, None, 0.999933, 1.297708]),
        ("global", [-1.36618, -0.878259, -0.195169, None, 0.878259, 1.561349]),
        ("none", [1 - 10 / 3, -1.5, 3 - 10 / 3, None, 1.5, 6 - 10 / 3]),
    ],
)
def test_known_advantages(std, want):
    got = advantages(REWARDS, GROUPS, advantage_std=std).values
    assert got[3] is None  # the only sample of its group
    assert [a for a in got if a is not None] == pytest.approx([a for a in want if a is not None], abs=1e-6)


@check_each(
    ("mode", "want"),
    [
        ("all", [-1.0, -1.0, 0.4, 1.0]),
        ("positive_only", [0.0, 0.0, 0.4, 1.0]),
        ("negative_only", [-1.0, -1.0, 0.0, 0.0]),
        ("one_only", [0.0, 0.0, 1.0, 1.0]),
        ("binary", [-1.0, -1.0, 1.0, 1.0]),
    ],
)
def test_modes_act_after_the_clip(mode, want):
    got = advantages([-4.0, -2.0, 1.4, 8.6], ["g"] * 4, advantage_std="none", adv_clip_max=1.0, adv_mode=mode)
    assert got.values == pytest.approx(want)
    assert got.stats["adv/clip_fraction"] == 0.75
    assert got.stats["adv/abs_mean"] == pytest.approx((5 + 3 + 0.4 + 7.6) / 4)


@given(
    st.permutations(range(9)),
    st.sampled_from(["group", "global", "none"]),
    st.sampled_from([{"combine": "mean"}, {"combine": "gdpo", "advantage_std": "group"}, {"best_of_n": 2}]),
)
def test_the_order_of_samples_changes_no_bit(order, std, changes):
    first = [0.1, 0.7, None, 0.3, 1e-3, 0.2, 5.0, None, 0.25]
    second = [3.0, 0.6, 0.1, 0.2, 0.7, 0.9, 0.4, 0.3, 0.0]
    rewards = [None if r is None else (r, other) for r, other in zip(first, second, strict=True)]
    groups = list("aabbbcccd")
    settings = {"advantage_std": std, "weights": (0.7, 1.3)} | changes
    straight = advantages(rewards, groups, **settings)
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], **settings)
    assert shuffled.values == [straight.values[i] for i in order]
    assert shuffled.stats == straight.stats


finite = st.floats(-100, 100)


@given(st.lists(st.tuples(finite, st.sampled_from("abcd")), min_size=1, max_size=20), finite)
def test_groups_are_centred_independently(samples, other):
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    alone = advantages(rewards, groups, advantage_std="none", adv_clip_max=1e9).values
    for g in set(groups):
        of_group = [a for a, h in zip(alone, groups, strict=True) if h == g]
        assert of_group == [None] or sum(of_group) == pytest.approx(0, abs=1e-3)
    more, of_group = [*rewards, other, 0.0], [*groups, "x", "x"]
    joined = advantages(more, of_group, advantage_std="none", adv_clip_max=1e9).values
    assert joined[:-2] == alone


def test_constant_groups_get_exactly_zero():
    noise = 1e-9
    rewards = [0.1, 0.1 + noise, 0.1 - noise, 900.0, 900.0 + 1e-4, 1.0, 2.0]
    got = advantages(rewards, list("aaabbcc"))
    assert got.values[:5] == [0.0] * 5
    assert got.values[6] == pytest.approx(0.5 / (0.5 + 1e-4))
    assert got.stats["adv/zero_std_ratio"] == pytest.approx(2 / 3)


def test_a_failed_sample_leaves_its_group_before_any_statistic():
    with_failure = advantages([1.0, None, 4.0, 2.0, 3.0], list("aaabb"))
    without = advantages([1.0, 4.0, 2.0, 3.0], list("aabb"))
    assert with_failure.values[1] is None
    assert [a for a in with_failure.values if a is not None] == without.values
    assert with_failure.stats | {"adv/samples_dropped": 0.0} == without.stats


def test_groups_with_fewer_than_two_rewards_are_skipped_and_counted():
    got = advantages([1.0, None, None, None, 2.0, 3.0], list("aabbcc"))
    assert got.values[:4] == [None] * 4
    assert None not in got.values[4:]
    assert got.stats["adv/groups_skipped"] == 2
    assert got.stats["adv/samples_dropped"] == 4


@pytest.mark.parametrize("rewards", [[None, None, None], [None, 1.0, None]])
def test_without_comparable_rewards_all_samples_are_dropped(rewards):
    got = advantages(rewards, list("aab"))
    assert got.values == [None] * 3
    assert got.stats["adv/groups_skipped"] == 2
    assert not {"adv/abs_mean", "adv/zero_std_ratio", "reward/total/group_std_mean"} & set(got.stats)
    assert ("reward/total/mean" in got.stats) == (1.0 in rewards)


def test_statistics_of_the_total():
    stats = advantages([1.0, 3.0, 10.0, 30.0, None], list("aabbb")).stats
    assert stats["reward/total/mean"] == 11
    assert stats["reward/total/std"] == pytest.approx(np.std([1, 3, 10, 30]))
    assert stats["reward/total/group_std_mean"] == pytest.approx((1 + 10) / 2)


@pytest.mark.parametrize(
    ("rewards", "message"), [([1.0, math.nan], "or None if failed"), ([1.0], "1 rewards but 2 group ids")]
)
def test_invalid_settings_are_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        advantages(rewards, ["g", "g"])


def test_unbiased_std_is_larger_by_the_root_of_n_over_n_minus_1():
    rewards = [1.0, 2.0, 4.0, 8.0]
    for std in ("group", "global"):
        biased = advantages(rewards, ["g"] * 4, advantage_std=std).values
        unbiased = advantages(rewards, ["g"] * 4, advantage_std=std, std_unbiased=True).values
        centred = np.array(rewards) - np.mean(rewards)
        assert biased == pytest.approx(centred / (np.std(rewards) + 1e-4), rel=1e-12)
        assert unbiased == pytest.approx(centred / (np.std(rewards, ddof=1) + 1e-4), rel=1e-12)


TWO = [(0.0, 10.0), (1.0, 30.0), (2.0, 20.0), (5.0, 7.0), (3.0, 7.0)]
TWO_GROUPS, TWO_WEIGHTS = list("aaabb"), (2.0, -0.5)


def each_normalised(unbiased):
    """Return the advantages [samples, 2] of each reward of TWO, normalized separately."""
    columns = []
    for values in np.array(TWO).T:
        of_groups = [values[:3], values[3:]]
        columns.append(np.concatenate([(g - g.mean()) / (g.std(ddof=unbiased) + 1e-4) for g in of_groups]))
    return np.stack(columns, 1)


@pytest.mark.parametrize("unbiased", [False, True])
def test_mean_averages_the_weighted_advantages_of_each_reward(unbiased):
    got = advantages(TWO, TWO_GROUPS, weights=TWO_WEIGHTS, combine="mean", std_unbiased=unbiased)
    assert got.values == pytest.approx(each_normalised(unbiased) @ TWO_WEIGHTS / 2, rel=1e-12)


def test_mean_over_all_samples_divides_each_reward_by_its_own_spread():
    got = advantages(TWO, TWO_GROUPS, weights=(1.0, 1.0), combine="mean", advantage_std="global").values
    first, second = np.array(TWO).T
    want = (first[:3] - 1) / (first.std() + 1e-4) + (second[:3] - 20) / (second.std() + 1e-4)
    assert got[:3] == pytest.approx(want / 2, rel=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_gdpo_normalises_the_weighted_sum_over_all_samples(unbiased):
    got = advantages(TWO, TWO_GROUPS, weights=TWO_WEIGHTS, combine="gdpo", std_unbiased=unbiased)
    joined = each_normalised(unbiased) @ TWO_WEIGHTS
    want = (joined - joined.mean()) / (joined.std(ddof=unbiased) + 1e-4)
    assert got.values == pytest.approx(want, rel=1e-12)
    assert got.stats["adv/zero_std_ratio"] == 0  # one of the two rewards of group b varies


@check_each("combine", ["sum", "mean", "gdpo"])
def test_groups_that_are_constant_throughout_are_zero_or_dropped(combine):
    rewards = [(1.0, 2.0), (1.0, 2.0), (0.0, 1.0), (1.0, 4.0), None]
    kept = advantages(rewards, list("aabbb"), weights=(1.0, 1.0), combine=combine)
    dropped = advantages(rewards, list("aabbb"), weights=(1.0, 1.0), combine=combine, zero_std="drop")
    assert kept.values[:2] == [0.0, 0.0]
    assert dropped.values[:2] == [None, None]
    assert dropped.values[2:] == kept.values[2:]
    assert dropped.values[3] > 0
    assert kept.stats["adv/zero_std_ratio"] == dropped.stats["adv/zero_std_ratio"] == 0.5
    assert (kept.stats["adv/samples_dropped"], dropped.stats["adv/samples_dropped"]) == (1, 3)


def test_best_of_n_trains_both_ends_of_a_group():
    rewards = [3.0, 1.0, None, 6.0, 5.0, 2.0, 4.0, 9.0, 8.0, 7.0]
    groups = ["a"] * 7 + ["b"] * 3
    got = advantages(rewards, groups, best_of_n=4)
    everyone = advantages(rewards, groups)
    assert [i for i, a in enumerate(got.values) if a is not None] == [1, 3, 4, 5, 7, 8, 9]
    assert all(a in (None, b) for a, b in zip(got.values, everyone.values, strict=True))
    assert got.stats["adv/samples_dropped"] == 3


def test_best_of_n_takes_the_first_of_equals_as_the_best():
    got = advantages([0.0, 1.0, 1.0, 1.0, 1.0], ["g"] * 5, best_of_n=2).values
    assert [a is not None for a in got] == [True, True, False, False, False]
    flat = advantages([1.0] * 4, ["g"] * 4, best_of_n=2).values
    assert flat == [0.0, None, None, 0.0]


def test_transform_acts_between_normalisation_and_clip():
    def exponential(a):
        return -np.exp(-a)

    got = advantages([0.0, 0.0, 9.0], ["g"] * 3, transform=exponential, adv_clip_max=1.5)
    plain = advantages([0.0, 0.0, 9.0], ["g"] * 3).values
    assert got.values == pytest.approx(np.clip(-np.exp(-np.array(plain)), -1.5, 1.5))
    assert got.stats["adv/clip_fraction"] == pytest.approx(2 / 3)


def test_best_of_n_must_be_even_and_gdpo_compares_within_groups():
    with pytest.raises(ValueError, match="best_of_n 3 must be even: half are the best samples, half the worst"):
        RlSettings(name="any", best_of_n=3)
    with pytest.raises(ValueError, match="set advantage_std: group"):
        RlSettings(name="any", combine="gdpo", advantage_std="global")


def test_total_is_the_weighted_sum_of_clipped_scores():
    functions = [
        RewardFunction(name="ocr", weight=2.0, clip=(0.0, 1.0)),
        RewardFunction(name="cost", weight=-0.5),
    ]
    scores = [scored(ocr=0.25, cost=1.0), scored(ocr=7.0, cost=-2.0), scored(ocr=-3.0, cost=0.0)]
    rewards = rewards_of(scores, functions)
    assert rewards.totals == [0.0, 3.0, 0.0]
    assert rewards.parts == [(0.25, 1.0), (1.0, -2.0), (0.0, 0.0)]
    assert rewards.weights == (2.0, -0.5)
    assert rewards.reorder([2, 0, 1]).totals == [0.0, 0.0, 3.0]
    assert rewards.reorder([2, 0, 1]).parts == [(0.0, 0.0), (0.25, 1.0), (1.0, -2.0)]


def test_total_is_clipped_then_scaled_and_the_clip_is_counted():
    scores = [scored(a=value) for value in (-3.0, 0.5, 2.0, None)]
    rewards = rewards_of(scores, [RewardFunction(name="a", weight=2.0)], clip=(-1.0, 3.0), scale=10.0)
    assert rewards.totals == [-10.0, 10.0, 30.0, None]
    assert rewards.stats == {"reward/total/clipped_fraction": pytest.approx(2 / 3)}
    settings = RlSettings(name="any", advantage_std="none", adv_clip_max=100.0)
    got = compute_advantages(rewards, ["g"] * 4, settings, num_selected=None, drops_zero_std=False)
    assert got.values == [-20.0, 0.0, 20.0, None]
    assert got.stats["reward/total/clipped_fraction"] == pytest.approx(2 / 3)


def test_a_failed_or_missing_weighted_score_gives_no_total():
    functions = [RewardFunction(name="a"), RewardFunction(name="b"), RewardFunction(name="watched", weight=0.0)]
    scores = [
        scored(a=1.0, b=None, watched=1.0),
        scored(a=1.0, watched=1.0),
        scored(a=1.0, b=2.0, watched=None),
        scored(a=1.0, b=2.0),
        {},
    ]
    rewards = rewards_of(scores, functions)
    assert rewards.totals == [None, None, 3.0, 3.0, None]
    assert rewards.parts == [None, None, (1.0, 2.0), (1.0, 2.0), None]


def test_an_overflowing_sum_gives_no_total():
    scores = [scored(a=1e308), scored(a=1.0)]
    assert rewards_of(scores, [RewardFunction(name="a", weight=100.0)]).totals == [None, 100.0]
    assert rewards_of(scores, [RewardFunction(name="a")], scale=100.0).totals == [None, 100.0]


def test_statistics_of_one_reward():
    functions = [RewardFunction(name="a", clip=(0.0, 1.0)), RewardFunction(name="b", weight=0.0)]
    scores = [
        scored(a=0.5, b=1.0, seconds=1.0),
        scored(a=2.5, b=1.0, seconds=3.0),
        scored(a=-1.0, b=1.0, seconds=2.0),
        scored(a=None, b=3.0, seconds=6.0),
        scored(b=4.0, seconds=0.0),
    ]
    stats = reward_stats(scores, list("ggggh"), functions)
    of_a = {tag.removeprefix("reward/a/"): v for tag, v in stats.items() if tag.startswith("reward/a/")}
    assert of_a == pytest.approx(
        {
            "mean": 2 / 3,
            "std": np.std([0.5, 2.5, -1.0]),
            "min": -1.0,
            "max": 2.5,
            "group_std_mean": np.std([0.5, 2.5, -1.0]),
            "failed": 2.0,
            "clipped_fraction": 2 / 3,
            "seconds_mean": 3.0,
        }
    )
    assert stats["reward/b/mean"] == 2.0
    assert stats["reward/b/group_std_mean"] == pytest.approx(np.std([1, 1, 1, 3]))
    assert stats["reward/b/failed"] == 0
    assert stats["reward/b/clipped_fraction"] == 0


def test_a_reward_that_always_fails_has_a_count_and_no_mean():
    stats = reward_stats([scored(a=None, seconds=2.0)] * 3, ["g"] * 3, [RewardFunction(name="a")])
    assert stats == {"reward/a/failed": 3.0, "reward/a/seconds_mean": 2.0}


def warnings(scores, functions, **recipe):
    rewards = rewards_of(scores, functions, **recipe)
    return reward_warnings(reward_stats(scores, ["g"] * len(scores), functions) | rewards.stats, functions, len(scores))


def test_constant_and_clipped_rewards_cause_warnings():
    clipped = RewardFunction(name="logit", clip=(0.0, 1.0))
    scores = [scored(ocr=0.25, logit=4.0), scored(ocr=0.25, logit=7.0), scored(ocr=None, logit=0.5)]
    assert warnings(scores, [RewardFunction(name="ocr"), clipped]) == [
        "reward ocr is 0.25 for all 2 samples: it gives no training signal",
        "reward logit: 67% of the scores are clipped. Widen its clip range",
    ]
    assert warnings(scores, [RewardFunction(name="logit")], clip=(-1.0, 1.0)) == [
        "reward.clip: 67% of totals are clipped. Widen it"
    ]


def test_varying_failing_single_and_unweighted_rewards_cause_no_warning():
    scores = [scored(a=0.1, b=None, watched=1.0), scored(a=0.2, b=0.0, watched=1.0)]
    functions = [RewardFunction(name="a"), RewardFunction(name="b"), RewardFunction(name="watched", weight=0.0)]
    assert warnings(scores, functions) == []


def chosen(rewards, groups, count, **settings):
    rewards = Rewards(list(rewards), [None if r is None else (r,) for r in rewards], (1.0,), {})
    return select_best_and_worst(rewards, groups, RlSettings(**{"name": "any"} | settings), count)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_best_of_n_keeps_the_samples_that_it_trains(first, second):
    groups = ["a", "b"] * 6
    rewards = [float(r) for pair in zip(first, second, strict=True) for r in pair]
    kept, teaching = chosen(rewards, groups, 4)
    trained = advantages(rewards, groups, best_of_n=4).values
    assert kept == [i for i, value in enumerate(trained) if value is not None]
    assert teaching == [name for name, of_group in (("a", first), ("b", second)) if len(set(of_group)) > 1]


def test_a_sample_without_a_reward_is_kept_only_if_others_are_missing():
    groups = ["a"] * 5 + ["b"] * 5
    rewards = [None, 1.0, 2.0, 3.0, 4.0, None, None, 5.0, None, None]
    kept, teaching = chosen(rewards, groups, 4)
    assert kept == [1, 2, 3, 4, 5, 6, 7, 8]
    assert teaching == ["a"]  # a group with a single reward has no comparison


@given(rewards=st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), max_size=8), order=st.randoms())
def test_a_groups_variance_is_that_of_its_valid_rewards_in_any_order(rewards, order):
    valid = [r for r in rewards if r is not None]
    mixed = order.sample(rewards, len(rewards))
    assert group_variance(mixed) == group_variance(rewards)
    if len(valid) < 2:
        assert group_variance(rewards) is None
    else:
        assert group_variance(rewards) == pytest.approx(np.var(valid, ddof=1), rel=1e-9, abs=1e-4)
    assert group_variance([0.1 * 3] * 4) == group_variance([0.3, 0.1 * 3, None]) == 0.0
