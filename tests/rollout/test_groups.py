"""Prompt groups selected by rewards: the same for every caller, at any time, and after a resume."""

import json
import logging

import pytest

from wfm_ds.data.prompt_weights import RewardStdTable
from wfm_ds.rollout.groups import Group, RewardStdGroups, group_rewards, plan_step_samples
from wfm_ds.seeds import draw_uniform
from wfm_ds.types import Prompt

PROMPTS = [Prompt(id=f"p/{i}", text=f"prompt {i}", metadata={"target": i}) for i in range(12)]
STEPS = 9


def source(ahead=0, prompts=PROMPTS, seed=5):
    table = RewardStdTable(len(prompts), floor=0.1, memory=0.6)
    return RewardStdGroups(prompts, 4, table=table, seed=seed, steps_ahead=ahead)


def rewards_of(step, group, size=6):
    """Return rewards of 0 and 1; the fraction of ones depends on the prompt."""
    share = int(group.prompt.id.removeprefix("p/")) / (len(PROMPTS) - 1)
    return [float(draw_uniform(0, "reward", step, group.prompt.id, k) < share) for k in range(size)]


def observe(groups, step):
    groups.observe_rewards(step, [(group, rewards_of(step, group)) for group in groups.step_groups(step)])


def ids(groups, step):
    return [group.prompt.id for group in groups.step_groups(step)]


def run(groups, first=1, last=STEPS):
    """Request the prompts of each step just before it. Return them and the final state."""
    asked = []
    for step in range(first, last + 1):
        asked.append(ids(groups, step))
        observe(groups, step)
    return asked, groups.state_dict()


@pytest.mark.parametrize("ahead", [0, 2])
def test_prompts_do_not_depend_on_when_they_are_requested(ahead):
    late, _ = run(source(ahead))
    groups = source(ahead)
    early = [ids(groups, step) for step in range(1, ahead + 2)]  # before the first publication
    for step in range(1, STEPS + 1):
        observe(groups, step)
        early.append(ids(groups, step + ahead + 1))
    assert early[:STEPS] == late


@pytest.mark.parametrize("ahead", [0, 2])
def test_prompts_depend_on_the_rewards_of_a_fixed_number_of_steps_before(ahead):
    """Compared with the definition: a new table for each step."""
    asked, _ = run(source(ahead))
    for step in range(1, STEPS + 1):
        fresh = source()
        for before in range(1, step - ahead):
            groups = [Group(prompt=PROMPTS[int(i.removeprefix("p/"))]) for i in asked[before - 1]]
            fresh.observe_rewards(before, [(group, rewards_of(before, group)) for group in groups])
        assert asked[step - 1] == [PROMPTS[i].id for i in fresh._sample_prompts(step, fresh.table.weights())]
    assert asked != run(source(2 - ahead))[0]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resumed_run_uses_the_same_prompts(ahead):
    whole, ended = run(source(ahead))
    for stop in range(STEPS):
        first, state = run(source(ahead), last=stop)
        again = source(ahead)
        again.load_state_dict(json.loads(json.dumps(state)))
        rest, state = run(again, first=stop + 1)
        assert first + rest == whole
        assert json.dumps(state) == json.dumps(ended)


def test_other_prompts_than_those_of_the_checkpoint_are_measured_anew(caplog):
    _, state = run(source())
    changed = [*PROMPTS[:-1], Prompt(id=PROMPTS[-1].id, text=PROMPTS[-1].text, metadata={"target": 0})]
    other = source(prompts=changed)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(state)
    assert "the prompts differ from the checkpoint's" in caplog.text
    assert run(other, first=STEPS + 1, last=STEPS + 3) == run(source(prompts=changed), STEPS + 1, STEPS + 3)


def test_failed_rewards_do_not_count_for_a_prompt():
    groups, clean = source(), source()
    a, b, c = (Group(prompt=prompt) for prompt in PROMPTS[:3])
    groups.observe_rewards(1, [(a, [None] * 4), (b, [None, 1.0, None, None]), (c, [0.0, None, 1.0, 1.0, None])])
    clean.observe_rewards(1, [(c, [0.0, 1.0, 1.0])])
    assert groups.state_dict() == clean.state_dict()
    groups.observe_rewards(2, [(c, [None] * 5)])
    clean.observe_rewards(2, [])
    assert groups.state_dict() == clean.state_dict()
    assert groups.data_metrics()["data/prompts_seen"] == 1


def test_equal_rewards_have_no_spread_whatever_they_are():
    groups = source()
    groups.observe_rewards(1, [(Group(prompt=prompt), [0.1 * i] * 7) for i, prompt in enumerate(PROMPTS)])
    assert len(set(groups.table.weights().tolist())) == 1
    assert groups.data_metrics()["data/prompt_reward_std_mean"] == 0


def test_both_groups_of_a_repeated_prompt_count():
    groups, other = source(), source()
    twice = [Group(prompt=PROMPTS[0])] * 2
    members = plan_step_samples(twice, group_size=2, step=1, run_seed=0)
    groups.observe_rewards(1, group_rewards(members, [0.0, 1.0, 0.5, 0.5]))
    other.observe_rewards(1, [(twice[0], [0.0, 1.0]), (twice[1], [0.5, 0.5])])
    assert groups.table.variances[0] == other.table.variances[0] == 0.25


def test_rewards_go_to_the_groups_of_their_samples_in_any_order():
    members = plan_step_samples([Group(prompt=prompt) for prompt in PROMPTS[:3]], group_size=2, step=1, run_seed=0)
    rewards = [0.0, 1.0, 2.0, None, 4.0, 5.0]
    order = [5, 0, 3, 1, 4, 2]
    whole = {group.prompt.id: sorted(map(str, found)) for group, found in group_rewards(members, rewards)}
    mixed = group_rewards([members[i] for i in order], [rewards[i] for i in order])
    assert {group.prompt.id: sorted(map(str, found)) for group, found in mixed} == whole
    assert whole == {"p/0": ["0.0", "1.0"], "p/1": ["2.0", "None"], "p/2": ["4.0", "5.0"]}


def test_additional_prompts_are_equal_after_a_resume_and_do_not_change_others():
    groups, untouched, resumed = source(), source(), source()
    _, state = run(groups)
    run(untouched)
    further = {attempt: [g.prompt.id for g in groups.refill_groups(STEPS + 1, attempt)] for attempt in (1, 2)}
    assert len(further[1]) == 4
    assert further[1] != further[2]
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert {attempt: [g.prompt.id for g in resumed.refill_groups(STEPS + 1, attempt)] for attempt in (2, 1)} == further
    assert ids(groups, STEPS + 1) == ids(untouched, STEPS + 1)
