"""Whole training commands with rewards that crash, are stopped, fail or never return."""

import json
import os

import psutil
import pytest

from faults.processes import go_on, read_lines, stop, wait
from faults.rollout_processes import start_training, until
from multi_rank.same_runs import assert_same_runs

END_S = 600.0  # long enough for a busy machine
pytestmark = pytest.mark.long


def train(stack, folder, model, reward, options, *overrides):
    """Start a tiny run in `folder` that logs to `folder`.log. It is killed at the end of the test if it still runs."""
    options = {"journal": str(folder.with_suffix(".journal")), **options}
    function = {"name": f"probe_rewards:{reward}", "workers": 2, "max_batch": 2, "options": options}
    words = [f"reward.functions={json.dumps([function])}", "run.steps=4", *overrides]
    return start_training(stack, folder, model, *words)


def steps(folder):
    """Return the metrics of all completed updates."""
    return [line for line in read_lines(folder / "metrics.jsonl") if "loss/total" in line]


def processes(trainer, word):
    children = psutil.Process(trainer.pid).children(recursive=True)
    return [child for child in children if word in child.cmdline()]


def nobody_is_left(family):
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def journal(folder):
    return read_lines(folder.with_suffix(".journal"))


def test_killing_and_stopping_rewards_does_not_change_the_run(stack, tmp_path, tiny_pipelines):
    model = tiny_pipelines("sd3")
    undisturbed = train(stack, tmp_path / "undisturbed", model, "Brightness", {})
    folder = tmp_path / "disturbed"
    run = train(stack, folder, model, "Brightness", {"seconds": 0.7})
    until(lambda: journal(folder) or run.poll() is not None)
    os.kill(journal(folder)[0]["pid"], 9)  # a reward worker that is processing a batch
    until(lambda: steps(folder) or run.poll() is not None)
    (service,) = processes(run, "wfm_reward.serve")
    orphans = service.children(recursive=True)
    service.kill()
    nobody_is_left(orphans)
    restarted = until(lambda: processes(run, "wfm_reward.serve"))[0]
    scored = len(journal(folder))
    until(lambda: len(journal(folder)) > scored or run.poll() is not None)
    stop(restarted.pid)
    wait(5.0)
    go_on(restarted.pid)
    family = processes(run, "-m")
    assert run.wait(END_S) == 0, folder.with_suffix(".log").read_text()
    assert undisturbed.wait(END_S) == 0
    nobody_is_left(family)
    assert_same_runs(tmp_path / "undisturbed", folder)


def test_samples_without_a_valid_reward_are_left_out_and_the_run_continues(stack, tmp_path, tiny_pipelines):
    folder, options = tmp_path / "run", {"how": ["raise", "nan", "short"]}
    run = train(stack, folder, tiny_pipelines("sd3"), "Failing", options, "rollout.group_size=16")
    assert run.wait(END_S) == 0, folder.with_suffix(".log").read_text()
    assert [step["rollout/samples"] for step in steps(folder)] == [2 * (16 - 3)] * 4


def test_a_reward_that_never_returns_ends_the_run_with_one_error(stack, tmp_path, tiny_pipelines):
    folder = tmp_path / "run"
    run = train(stack, folder, tiny_pipelines("sd3"), "Failing", {"how": ["hang"] * 4}, "reward.timeout_s=2")
    until(lambda: journal(folder) or run.poll() is not None)
    family = processes(run, "-m")
    assert run.wait(END_S) == 1, folder.with_suffix(".log").read_text()
    nobody_is_left(family)
    message = json.loads((folder / "result.json").read_text())["message"]
    assert message.startswith("more than 20% of samples failed in 3 consecutive steps; last errors: ")
    assert "timeout after 2 s in probe_rewards:Failing" in message
    assert folder.with_suffix(".log").read_text().count(message) == 1
