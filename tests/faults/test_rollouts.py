"""Rollout workers that are killed, stopped, join late or leave, and a killed trainer, with real processes."""

import signal

import psutil
import pytest

from faults.rollout_processes import PATIENCE_S, has, start, train, until
from multi_rank.same_runs import assert_same_runs

pytestmark = pytest.mark.long


def join(stack, folder, name):
    log = folder / f"{name}.log"
    run = folder / "async"
    words = [str(run / "recipe.yaml"), "--connect", str(run / "rollout" / "pipes.json"), "--name", name]
    return start(stack, log, "wfm_ds", "rollout", *words), log


def test_dying_hanging_late_and_leaving_workers_do_not_change_the_result(stack, tmp_path, tiny_pipelines):
    model = tiny_pipelines("sd3")
    undisturbed = train(stack, tmp_path, "colocated", model, seconds=0)
    on_policy = ["rollout.mode=async", "rollout.max_staleness=0", "rollout.spawn=0", "rollout.worker_timeout_s=15"]
    trainer = train(stack, tmp_path, "async", model, *on_policy, seconds=0.7)
    until((tmp_path / "async" / "rollout" / "pipes.json").exists)
    killed, _ = join(stack, tmp_path, "killed")
    until((tmp_path / "async.journal").exists)
    killed.kill()  # its chunks are being scored now

    # Joins late, when chunks of the killed worker are waiting.
    stopped, stopped_log = join(stack, tmp_path, "stopped")
    until(has(stopped_log, "loaded publication"))
    stopped.send_signal(signal.SIGSTOP)
    leaving, leaving_log = join(stack, tmp_path, "leaving")
    until(has(tmp_path / "async" / "logs" / "rank_0.log", "worker stopped/0 was silent for"))
    # Wait for the first step: a chunk that is lost three times is dropped.
    until(has(tmp_path / "async" / "metrics.jsonl", "loss/total"))
    assert "loaded publication" in leaving_log.read_text()
    stopped.send_signal(signal.SIGCONT)
    leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(PATIENCE_S) == 0
    assert trainer.wait(PATIENCE_S) == 0, (tmp_path / "async.log").read_text()
    assert stopped.wait(PATIENCE_S) == 0
    said = (tmp_path / "async" / "logs" / "rank_0.log").read_text()
    assert "worker leaving/" not in said, "it said goodbye: nobody waited until it was silent"
    assert undisturbed.wait(PATIENCE_S) == 0
    assert_same_runs(tmp_path / "colocated", tmp_path / "async")


def test_a_killed_child_is_replaced_and_none_outlives_the_trainer(stack, tmp_path, tiny_pipelines):
    words = ["rollout.mode=async", "rollout.spawn=2", "run.steps=1000"]
    trainer = train(stack, tmp_path, "async", tiny_pipelines("sd3"), *words, seconds=0)
    logs = [tmp_path / "async" / "rollout" / f"spawned-{i}.log" for i in range(2)]
    for log in logs:
        until(has(log, "loaded publication"))

    def workers():
        children = psutil.Process(trainer.pid).children(recursive=True)
        return [c for c in children if "rollout" in c.cmdline()]

    target = until(lambda: [c for c in workers() if "spawned-0.1" in c.cmdline()])[0]
    target.kill()
    until(has(logs[0], "spawned-0.2 INFO loaded publication"))
    family = psutil.Process(trainer.pid).children(recursive=True)
    assert len(workers()) == 2
    trainer.kill()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == []
