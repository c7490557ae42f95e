"""When a supervisor restarts a dead process and when it gives up, with real processes and signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from each_case import check_each
from faults.processes import PATIENCE_S, until
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.remote import service
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.submissions import TaskRequest
from wfm_ds.types import MediaBatch

TINY = Path(__file__).parent.parent / "recipes" / "sd3_nft_async.yaml"
# A worker with one lane that returns an empty result for every task.
WORKER = """
import signal, sys
from wfm_ds.transport.worker import LeaseWorker
worker = LeaseWorker(sys.argv[1], worker=f"{sys.argv[2]}/0", name="", kinds=[sys.argv[3]], parent_fd=0)
signal.signal(signal.SIGTERM, lambda *_: worker.stop())
worker.run(lambda task, progress: {})
"""


class Rollouts(service.RolloutService):
    def worker_command(self, name, place):
        return [sys.executable, "-c", WORKER, self.broker.worker_endpoint, name, TASK_KIND]


@pytest.fixture
def rollouts(tmp_path):
    words = [f"run.output_dir={tmp_path}", "rollout.spawn=1", "rollout.devices=[cpu]"]
    one = Rollouts(recipe_file.load_recipe(TINY, words), {}, "", num_ranks=1)
    yield one
    one.stop()


def hit(rollouts, life, number=signal.SIGKILL):
    """Wait until the worker's process number `life` has connected, then send it a signal."""
    until(lambda: f"spawned-0.{life}/0" in rollouts.broker.worker_ids())
    os.kill(rollouts.workers[0].child.process.pid, number)


def test_a_rollout_worker_is_given_up_after_deaths_without_progress(rollouts, monkeypatch):
    monkeypatch.setattr(service, "MAX_DEATHS", 2)
    child, client = rollouts.workers[0], PipeClient(rollouts.endpoint, run="run", client="rank0")
    for life in (1, 2, 3):
        client.submit([{}], [], [TaskRequest(f"task {life}", TASK_KIND, 0, 1, deadline_s=1e12)])
        assert [outcome.ok for outcome in client.take_outcomes(PATIENCE_S)] == [True]
        hit(rollouts, life)
    client.close()
    assert child.failure == ""
    hit(rollouts, 4)
    assert "spawned-0 died repeatedly, last exit status -9" in until(lambda: child.failure)
    assert rollouts.failure_reason() == child.failure


@pytest.mark.unit
def test_a_terminated_rollout_worker_is_replaced_while_there_is_work(rollouts):
    hit(rollouts, 1, signal.SIGTERM)
    until(lambda: "spawned-0.2/0" in rollouts.broker.worker_ids())
    rollouts.broker.dismiss_workers("the run is complete")
    until(lambda: not rollouts.broker.worker_ids())
    rollouts.workers[0].child.watcher.join(PATIENCE_S)
    assert rollouts.workers[0].process_name == "spawned-0.2"
    assert rollouts.worker_failures() == []


@check_each("ask", [lambda process: process.stdin.close(), lambda process: process.send_signal(signal.SIGTERM)])
def test_a_starting_rollout_worker_exits_at_once(tmp_path, ask):
    """A worker that waits for a trainer exits on closed stdin or SIGTERM. The wait itself would last a minute."""
    words = ["rollout", str(TINY), "--connect", f"ipc://{tmp_path}/nobody", "--stop-on-eof"]
    process = subprocess.Popen([sys.executable, "-m", "wfm_ds", *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE)

    def is_waiting():
        assert process.poll() is None, process.stderr.read()
        [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        return int(caught, 16) >> (signal.SIGTERM - 1) & 1

    try:
        until(is_waiting)
        ask(process)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_reward_with_occasionally_dying_workers_is_not_down(tmp_path, probes):
    moody = {"name": "probe_rewards:Moody", "workers": 2, "max_batch": 1}
    recipe = RewardRecipe(functions=[moody | {"options": {"journal": str(tmp_path / "journal")}}])
    with RewardService(recipe, tmp_path) as rewards:
        client = RewardClient(rewards.endpoint, recipe, "run", "rank0")
        for number in range(7):  # more deaths than the limit that marks a reward as down
            (tmp_path / "journal.died").unlink(missing_ok=True)
            media = np.zeros((1, 4, 4, 3), np.uint8)
            client.submit(MediaBatch(media=media, sample_ids=[f"s{number}"], prompts=["die once"], metadata=[{}]))
            assert client.wait()[f"s{number}"][moody["name"]].failure is None
        client.close()
    assert (tmp_path / "reward_service.log").read_text().count("next start in") == 7
