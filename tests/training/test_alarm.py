"""The alarm on held-out rewards: simulated curves of a run with reward hacking and of a healthy run."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from each_case import check_each
from wfm_ds.training.reward_alarm import RewardAlarm
from wfm_ds.training.rl import RlLoop

LOOKS = 12


def curves(rng, prompts, *, judged, seeds=2, looks=LOOKS, judges=3):
    """Yield simulated evaluations of a run as (trained reward, held-out rewards).

    The trained reward rises by half a standard deviation, the first held-out reward changes by `judged`, and the others
    stay constant. The change differs between prompts; the offset of each seed is constant.
    """
    worth = rng.normal(size=(judges + 1, prompts, 1)) + rng.normal(size=(judges + 1, prompts, seeds))
    slope = 0.3 * rng.normal(size=(judges + 1, prompts, 1))
    ends = np.array([0.75, judged, *[0.0] * (judges - 1)])[:, None, None]
    for look in range(looks):
        done = look / (looks - 1)
        total, *judged_by = worth + done * (ends + slope) + 0.4 * rng.normal(size=worth.shape) * (look > 0)
        yield total, {f"judge{i}": scores for i, scores in enumerate(judged_by)}


def alarms(rng, prompts, **settings):
    """Return {evaluation index: names of the falling rewards} for each evaluation with an alarm."""
    alarm, found = RewardAlarm([]), {}
    for look, (total, judges) in enumerate(curves(rng, prompts, **settings)):
        metrics = alarm.update(total, judges)
        assert metrics.get("val/alarm", 0.0) == bool(alarm.falling_rewards)
        if alarm.falling_rewards:
            found[look] = set(alarm.falling_rewards)
    return found


def test_a_hacked_reward_raises_the_alarm_and_names_the_held_out_reward():
    found = [alarms(np.random.default_rng(seed), 32, judged=-0.75) for seed in range(20)]
    assert sum(LOOKS - 1 in one for one in found) >= 19
    assert all(names == {"judge0"} for one in found for names in one.values())
    assert min(look for one in found for look in one) >= 2  # never at the first comparison


def test_a_healthy_run_raises_no_alarm():
    found = [bool(alarms(np.random.default_rng(seed), 16, judged=0.5)) for seed in range(60)]
    assert sum(found) <= 2


def test_a_fall_of_all_rewards_is_not_reward_hacking():
    """The trained reward falls too: the run is broken, which its reward curve shows."""
    alarm, rng = RewardAlarm([]), np.random.default_rng(0)
    for total, judges in curves(rng, 32, judged=-1.0):
        alarm.update(-total, judges)
        assert not alarm.falling_rewards


def test_a_resumed_alarm_continues_and_a_changed_evaluation_resets_it():
    looks = list(curves(np.random.default_rng(3), 32, judged=-1.0))
    looks[0][1]["judge1"][0, 0] = np.nan  # a failed reward
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


@check_each("raised", [True, False])
def test_the_alarm_is_repeated_at_the_end_of_a_run(raised):
    alarm, lines = RewardAlarm([]), []
    resumed = RewardAlarm([])  # after the last evaluation
    alarm.falling_rewards = {"ocr": 1.5} if raised else {}
    resumed.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
    loop = object.__new__(RlLoop)
    monitor = SimpleNamespace(log_message=lines.append, log_at_close=lines.append, set_outcome=lambda *_: None)
    recipe, engine = (
        SimpleNamespace(run=SimpleNamespace(output_dir=Path("out"), steps=3)),
        SimpleNamespace(num_updates=1),
    )
    loop.job = SimpleNamespace(engine=engine, recipe=recipe, monitor=monitor, should_stop=lambda: False)
    loop.validator = SimpleNamespace(alarm=resumed, evaluate_at_end=lambda step: {})
    loop.step, loop.metrics, loop.start, loop.save_results = 3, {}, lambda: None, lambda: None
    message = loop.run_to_end().message
    assert message.startswith("ALARM: since the first evaluation the trained reward rose and ocr by ") == raised
    assert (lines[-1] == message) == raised


def test_without_a_trained_reward_changes_are_reported_but_no_alarm():
    alarm = RewardAlarm([])
    ones, zeros = np.ones((6, 1)), np.zeros((6, 1))
    assert alarm.update(None, {"a": zeros}) == {}
    assert alarm.update(None, {"a": -ones}) == {"val/held_out/a/change": pytest.approx(-1)}
