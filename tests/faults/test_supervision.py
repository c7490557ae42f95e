"""When a process that died is started again, and when its supervisor gives up: real processes and signals."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from faults.processes import PATIENCE_S, until
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout import TASK_KIND
from wfm_ds.rollout.remote import service
from wfm_ds.rollout.rewards import RewardClient, RewardService
from wfm_ds.transport.client import PipeClient
from wfm_ds.transport.pending_submissions import TaskRequest
from wfm_ds.types import MediaBatch

TESTS = Path(__file__).parent.parent
TINY = TESTS / "recipes" / "sd3_nft_async.yaml"
# A worker of one lane that does nothing, well.
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
    """Signal that life of the child, once it has said hello."""
    until(lambda: f"spawned-0.{life}/0" in rollouts.broker.worker_ids())
    os.kill(rollouts.workers[0].pid, number)


@pytest.mark.unit
def test_a_rollout_worker_is_given_up_for_deaths_in_which_nothing_was_done(rollouts, monkeypatch):
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
def test_a_rollout_worker_that_was_asked_to_leave_is_replaced_until_there_is_no_more_work(rollouts):
    hit(rollouts, 1, signal.SIGTERM)
    until(lambda: "spawned-0.2/0" in rollouts.broker.worker_ids())
    rollouts.broker.dismiss_workers("the run is complete")
    until(lambda: not rollouts.broker.worker_ids())
    rollouts.workers[0]._watcher.join(PATIENCE_S)
    assert rollouts.workers[0].process_name == "spawned-0.2"
    assert rollouts.worker_failures() == []


@pytest.mark.unit
def test_a_reward_whose_workers_die_now_and_then_is_not_down(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "reward"), prepend=os.pathsep)
    monkeypatch.syspath_prepend(TESTS / "reward")
    moody = {"name": "probe_rewards:Moody", "workers": 2, "max_batch": 1}
    recipe = RewardRecipe(functions=[moody | {"options": {"journal": str(tmp_path / "journal")}}])
    with RewardService(recipe, tmp_path) as rewards:
        client = RewardClient(rewards.endpoint, recipe, "run", "rank0")
        for number in range(7):  # more than the deaths that speak against a reward
            (tmp_path / "journal.died").unlink(missing_ok=True)
            media = np.zeros((1, 4, 4, 3), np.uint8)
            client.submit(MediaBatch(media=media, sample_ids=[f"s{number}"], prompts=["die once"], metadata=[{}]))
            assert client.wait()[f"s{number}"][moody["name"]].failure is None
        client.close()
    assert (tmp_path / "reward_service.log").read_text().count("next start in") == 7
