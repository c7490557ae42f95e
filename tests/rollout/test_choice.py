"""Selection of the groups of an RL step, and the ranks that train their samples. tests/multi_rank/test_choosing.py
tests full runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.rollout.groups import Group, plan_step_samples
from wfm_ds.rollout.selective_source import GroupSelection, within_group_correlation
from wfm_ds.types import Prompt

NUM_GROUPS, GROUP_SIZE = 4, 3


def members_of(num_groups, *, size=GROUP_SIZE, first_group=0):
    groups = [Group(prompt=Prompt(id=f"p{first_group + g}", text="a cat")) for g in range(num_groups)]
    return plan_step_samples(groups, group_size=size, step=7, run_seed=1, first_group=first_group)


def ids(members):
    return list(dict.fromkeys(member.group_id for member in members))


@given(st.lists(st.lists(st.booleans(), min_size=NUM_GROUPS, max_size=NUM_GROUPS), min_size=1, max_size=5))
def test_groups_with_varying_rewards_come_first_and_a_step_is_always_full(rounds):
    choice, generated, teaching = GroupSelection(NUM_GROUPS), [], []
    for attempt, teaches in enumerate(rounds):
        if choice.num_missing == 0:
            break
        members = members_of(choice.num_missing, first_group=attempt * NUM_GROUPS)
        good = [g for g, does in zip(ids(members), teaches, strict=False) if does]
        choice.add_round(members, good)
        generated += ids(members)
        teaching += good
        assert choice.num_missing == NUM_GROUPS - len(teaching)
        assert choice.num_dropped == len(generated) - len(teaching)
        others = [g for g in generated if g not in teaching]
        assert ids(choice.selected_samples) == [*teaching, *others][:NUM_GROUPS]
        assert len(choice.selected_samples) == NUM_GROUPS * GROUP_SIZE


def test_all_samples_are_selected_if_all_groups_have_varying_rewards():
    choice, members = GroupSelection(NUM_GROUPS), members_of(NUM_GROUPS)
    choice.add_round(members, set(ids(members)))
    assert choice.selected_samples == members
    assert (choice.num_missing, choice.num_dropped) == (0, 0)


def test_a_larger_group_starts_with_the_samples_of_a_smaller_one():
    few, many = members_of(2, size=2), members_of(2, size=5)
    assert [m for m in many if int(m.sample_id.rsplit("/", 1)[1]) < 2] == few
    seeds = [m.seed for m in [*members_of(2), *members_of(2, first_group=2)]]
    assert len(set(seeds)) == len(seeds)


def test_the_correlation_within_groups_is_that_of_numpy_without_the_means_of_the_groups():
    rng = np.random.default_rng(0)
    first, noise = rng.normal(size=(2, 40))
    groups = [f"g{i % 5}" for i in range(40)]
    offset = np.array([100.0 * (i % 5) for i in range(40)])
    second = 0.5 * first + noise
    centred = [x - np.array([x[[h == g for h in groups]].mean() for g in groups]) for x in (first, second)]
    want = np.corrcoef(*centred)[0, 1]
    got = within_group_correlation([*(first + offset), 1.0], [*(second - offset), None], [*groups, "g0"])
    assert got == pytest.approx(want, abs=1e-9)
    assert within_group_correlation([1.0, 2.0], [2.0, 4.0], ["a", "a"]) == pytest.approx(1.0)


@check_each("rewards", [([1.0, 1.0], [0.0, 1.0]), ([0.0, 1.0], [0.1, 0.1]), ([None, 1.0], [1.0, None]), ([], [])])
def test_an_undefined_correlation_is_none(rewards):
    first, second = rewards
    got = within_group_correlation(first, second, ["a"] * len(first))
    assert got is None
