"""The alarm of held-out judges: on curves of a run that is fooled, and on those of one that is not."""

import json

import numpy as np
import pytest

from wfm_ds.training.reward_alarm import RewardAlarm

LOOKS = 12


def curves(rng, prompts, *, judged, seeds=2, looks=LOOKS, judges=3):
    """Evaluations of a run: the reward rises by half a standard deviation, the first judge ends at `judged`, the others
    stay where they are. A prompt gains more or less than others; what a seed is worth stays."""
    worth = rng.normal(size=(judges + 1, prompts, 1)) + rng.normal(size=(judges + 1, prompts, seeds))
    slope = 0.3 * rng.normal(size=(judges + 1, prompts, 1))
    ends = np.array([0.75, judged, *[0.0] * (judges - 1)])[:, None, None]
    for look in range(looks):
        done = look / (looks - 1)
        total, *judged_by = worth + done * (ends + slope) + 0.4 * rng.normal(size=worth.shape) * (look > 0)
        yield total, {f"judge{i}": scores for i, scores in enumerate(judged_by)}


def alarms(rng, prompts, **settings):
    """The evaluations at which there was an alarm, and by whom."""
    alarm, found = RewardAlarm([]), {}
    for look, (total, judges) in enumerate(curves(rng, prompts, **settings)):
        metrics = alarm.update(total, judges)
        assert metrics.get("val/alarm", 0.0) == bool(alarm.falling_rewards)
        if alarm.falling_rewards:
            found[look] = set(alarm.falling_rewards)
    return found


def test_a_run_that_is_fooled_raises_it_and_names_the_judge():
    found = [alarms(np.random.default_rng(seed), 32, judged=-0.75) for seed in range(20)]
    assert sum(LOOKS - 1 in one for one in found) >= 19
    assert all(names == {"judge0"} for one in found for names in one.values())
    assert min(look for one in found for look in one) >= 2  # never at the first comparison


def test_a_healthy_run_raises_none():
    found = [bool(alarms(np.random.default_rng(seed), 16, judged=0.5)) for seed in range(60)]
    assert sum(found) <= 2


def test_a_judge_that_falls_alone_is_no_hacking():
    """The reward falls too: the run is broken, and its reward says so itself."""
    alarm, rng = RewardAlarm([]), np.random.default_rng(0)
    for total, judges in curves(rng, 32, judged=-1.0):
        alarm.update(-total, judges)
        assert not alarm.falling_rewards


def test_it_goes_on_where_a_run_was_stopped_and_forgets_another_evaluation():
    looks = list(curves(np.random.default_rng(3), 32, judged=-1.0))
    looks[0][1]["judge1"][0, 0] = np.nan  # a reward that failed
    whole, first, second, other = RewardAlarm(["p"]), RewardAlarm(["p"]), RewardAlarm(["p"]), RewardAlarm(["q"])
    wanted = [whole.update(*one) for one in looks]
    found = [first.update(*one) for one in looks[:7]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [second.update(*one) for one in looks[7:]]
    assert found == wanted
    assert wanted[-1]["val/alarm"] == 1
    other.load_state_dict(first.state_dict())
    assert other.update(*looks[0]) == {}
    assert "judge0 by" in whole.summary()


def test_without_a_trained_reward_there_are_changes_and_no_alarm():
    alarm = RewardAlarm([])
    ones, zeros = np.ones((6, 1)), np.zeros((6, 1))
    assert alarm.update(None, {"a": zeros}) == {}
    assert alarm.update(None, {"a": -ones}) == {"val/held_out/a/change": pytest.approx(-1)}
