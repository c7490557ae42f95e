"""Rewards that crash, hang or kill their worker, a killed service and a killed trainer, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import reward_http
from faults.processes import PATIENCE_S, read_lines, stop, until
from reward_samples import media_batch
from wfm_ds.program import JOB_SIGNALS
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient

BRIGHTNESS, OTHER, MOODY = (f"probe_rewards:{name}" for name in ("Brightness", "Other", "Moody"))


pytestmark = pytest.mark.usefixtures("probes")


def a_recipe(*functions, **changes):
    return RewardRecipe(functions=list(functions), **({"timeout_s": PATIENCE_S, "start_timeout_s": 60} | changes))


def a_batch(prompts, prefix="s"):
    media = np.random.default_rng(0).integers(0, 256, (len(prompts), 8, 8, 3)).astype(np.uint8)
    return media_batch(media, prompts, prefix=prefix)


def moody(folder, **changes):
    return {"name": MOODY, "max_batch": 1, "options": {"journal": str(folder / "journal")}, **changes}


def journal(folder):
    return read_lines(folder / "journal")


def failures(scores, reward):
    return {sample_id: of_sample[reward].failure for sample_id, of_sample in scores.items()}


@contextmanager
def attached(endpoint, recipe, **options):
    client = RewardClient(endpoint, recipe, "run", "rank0", **options)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def serving(folder, rewards):
    """Start a reward service with these rewards. Yield its process and an attached client."""
    recipe = a_recipe(*({"name": n} for n in rewards), spawn=False, endpoint=str(folder / "pipes.json"))
    with reward_http.serving(folder, {"rewards": rewards}) as (service, _), attached(recipe.endpoint, recipe) as client:
        yield service, client


def send_job_signals(process):
    """Send a process the signals that SLURM sends to all processes of a job. Only the ranks may act on them."""
    for number in JOB_SIGNALS:
        process.send_signal(number)


def test_after_a_killed_worker_only_its_task_is_repeated(tmp_path):
    options = {"journal": str(tmp_path / "journal"), "seconds": 1.0}
    recipe = a_recipe({"name": BRIGHTNESS, "max_batch": 2, "workers": 2, "options": options})
    with RewardService(recipe, tmp_path) as service, attached(service.endpoint, recipe) as client:
        client.submit(a_batch(["a"] * 6))
        target = until(lambda: journal(tmp_path))[0]
        for process in [psutil.Process(service.pid), *psutil.Process(service.pid).children()]:
            send_job_signals(process)
        os.kill(target["pid"], signal.SIGKILL)
        scores = client.wait()
    assert failures(scores, BRIGHTNESS) == {f"s{i}": None for i in range(6)}
    done = [i for line in journal(tmp_path) for i in line["ids"]]
    assert sorted(done) == sorted([f"s{i}" for i in range(6)] + target["ids"])


def test_an_item_that_kills_its_workers_fails_by_name_and_the_reward_lives_on(tmp_path):
    recipe = a_recipe(moody(tmp_path, workers=2), {"name": OTHER})
    with RewardService(recipe, tmp_path) as service, attached(service.endpoint, recipe) as client:
        client.submit(a_batch(["a", "die", "b", "die once", "c"]))
        scores = client.wait()
        assert failures(scores, MOODY) == {
            **dict.fromkeys(["s0", "s2", "s3", "s4"]),
            "s1": "its worker died (killed by SIGKILL) (3 attempts)",
        }
        assert failures(scores, OTHER) == {f"s{i}": None for i in range(5)}
        client.submit(a_batch(["a"], prefix="next"))
        assert failures(client.wait(), MOODY) == {"next0": None}
    assert sum(line["ids"] == ["s1"] for line in journal(tmp_path)) == 3


def test_a_reward_with_repeatedly_dying_workers_is_down_and_fails_at_once(tmp_path):
    options = {"journal": str(tmp_path / "journal")}
    rewards = {MOODY: {"workers": 4, "max_batch": 1, "options": options}, OTHER: {}}
    with serving(tmp_path, rewards) as (_, client):
        client.submit(a_batch(["die", "die", "die"]))
        first = failures(client.wait(), MOODY)
        down = f"reward {MOODY} is down: its workers died 5 times within 10 minutes, last: killed by SIGKILL"
        assert down in first.values()
        started = time.monotonic()
        client.submit(a_batch(["a"] * 20, prefix="later"))
        scores = client.wait()
        assert time.monotonic() - started < 5
        assert failures(scores, MOODY) == {f"later{i}": down for i in range(20)}
        assert failures(scores, OTHER) == {f"later{i}": None for i in range(20)}


def test_a_reward_that_hangs_is_replaced_and_its_item_fails_by_name(tmp_path):
    rewards = {MOODY: {"workers": 2, "max_batch": 1, "stall_s": 1.0, "options": {"journal": str(tmp_path / "journal")}}}
    with serving(tmp_path, rewards) as (_, client):
        client.submit(a_batch(["a", "hang", "b", "c"]))
        scores = client.wait()
    assert failures(scores, MOODY) == {"s0": None, "s1": "no progress for 1 s (3 attempts)", "s2": None, "s3": None}
    pids = [line["pid"] for line in journal(tmp_path) if line["ids"] == ["s1"]]
    assert len(set(pids)) == 3
    assert "in score" in (tmp_path / "service.log").read_text(), "the stack of what hung is in the log"


def test_a_hang_beyond_the_deadline_does_not_delay_the_next_step(tmp_path):
    recipe = a_recipe(moody(tmp_path), {"name": OTHER}, timeout_s=1.5)
    with RewardService(recipe, tmp_path) as service, attached(service.endpoint, recipe) as client:
        client.submit(a_batch(["hang", "a"]))
        started = time.monotonic()
        scores = client.wait()
        assert time.monotonic() - started < 4
        assert failures(scores, MOODY) == dict.fromkeys(["s0", "s1"], f"timeout after 1.5 s in {MOODY}")
        assert failures(scores, OTHER) == dict.fromkeys(["s0", "s1"])

        def next_step():
            client.submit(a_batch(["b"], prefix="next"))
            return failures(client.wait(), MOODY) == {"next0": None}

        until(next_step)  # the hung worker is replaced although its task has timed out


@pytest.mark.unit
def test_a_killed_service_is_started_again_and_everything_is_scored(tmp_path):
    options = {"journal": str(tmp_path / "journal"), "seconds": 0.3}
    recipe = a_recipe({"name": BRIGHTNESS, "max_batch": 1, "options": options})
    with RewardService(recipe, tmp_path) as service, attached(service.endpoint, recipe) as client:
        client.submit(a_batch(["a"] * 8))
        until(lambda: len(journal(tmp_path)) >= 3)
        first, orphans = service.pid, psutil.Process(service.pid).children(recursive=True)
        os.kill(first, signal.SIGKILL)
        scores = client.wait()
        assert failures(scores, BRIGHTNESS) == {f"s{i}": None for i in range(8)}
        assert service.pid != first
        _, alive = psutil.wait_procs(orphans, timeout=10)
        assert alive == []
    assert {i for line in journal(tmp_path) for i in line["ids"]} == {f"s{i}" for i in range(8)}


def test_a_service_that_stays_dead_fails_the_waiting_samples(tmp_path):
    recipe = a_recipe({"name": BRIGHTNESS, "options": {"seconds": 30.0}})
    service = RewardService(recipe, tmp_path)
    with attached(service.endpoint, recipe, lost_after_s=1.5) as client:
        client.submit(a_batch(["a", "b"]))
        service.stop()
        started = time.monotonic()
        for prefix in ("s", "t"):
            lost = failures(client.wait(), BRIGHTNESS)
            assert lost.keys() == {f"{prefix}0", f"{prefix}1"}
            assert all(why.startswith("reward service lost: ") for why in lost.values())
            client.submit(a_batch(["a", "b"], prefix="t"))
        assert time.monotonic() - started < 8


def test_a_killed_trainer_leaves_no_process_and_no_socket(tmp_path):
    code = f"""
import sys, pathlib, numpy
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient
from wfm_ds.types import MediaBatch
folder = pathlib.Path({str(tmp_path)!r})
function = dict(name={BRIGHTNESS!r}, workers=2, options=dict(seconds=60, journal=str(folder / "journal")))
recipe = RewardRecipe(functions=[function])
service = RewardService(recipe, folder)
client = RewardClient(service.endpoint, recipe, "run", "rank0")
media = numpy.zeros((1, 4, 4, 3), numpy.uint8)
client.submit(MediaBatch(media=media, sample_ids=["s"], prompts=[""], metadata=[{{}}]))
client.wait()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    signalled = []

    def signal_new_children():
        for process in psutil.Process(trainer.pid).children(recursive=True):
            if process not in signalled:
                signalled.append(process)
                send_job_signals(process)

    until(lambda: signal_new_children() or journal(tmp_path))  # a worker is processing a task
    family = psutil.Process(trainer.pid).children(recursive=True)
    sockets = Path(json.loads((tmp_path / "pipes.json").read_text())["clients"].removeprefix("ipc://")).parent
    assert len(family) == 3
    assert sockets.exists()
    assert family == signalled
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []
    assert not sockets.exists()
    assert not (tmp_path / "pipes.json").exists()


def test_sigterm_waits_for_the_running_task_and_a_second_one_does_not(tmp_path):
    for signals, scored in ((1, True), (2, False)):
        folder = tmp_path / str(signals)
        folder.mkdir()
        options = {"journal": str(folder / "journal"), "seconds": 2.0}
        with serving(folder, {BRIGHTNESS: {"max_batch": 4, "options": options}}) as (service, client):
            client.submit(a_batch(["a"]))
            until(lambda folder=folder: journal(folder))
            family = psutil.Process(service.pid).children(recursive=True)
            service.terminate()
            if signals == 2:
                until(lambda folder=folder: "stopping: SIGTERM" in (folder / "service.log").read_text())
                service.terminate()
            assert service.wait(PATIENCE_S) == 0
            _, alive = psutil.wait_procs(family, timeout=5)
            assert alive == []
            outcomes = client._pipe.take_outcomes(1.0)
            assert [outcome.ok for outcome in outcomes] == ([True] if scored else [])
            assert not (folder / "pipes.json").exists()


def test_a_worker_that_is_stopped_is_killed_and_replaced(tmp_path):
    options = {"journal": str(tmp_path / "journal"), "seconds": 0.5}
    with serving(tmp_path, {BRIGHTNESS: {"max_batch": 1, "stall_s": 2.0, "options": options}}) as (_, client):
        client.submit(a_batch(["a"] * 3))
        target = until(lambda: journal(tmp_path))[0]["pid"]
        stop(target)
        scores = client.wait()
        assert failures(scores, BRIGHTNESS) == {f"s{i}": None for i in range(3)}
        assert not psutil.pid_exists(target)
    assert "makes no progress and does not exit" in (tmp_path / "service.log").read_text()
    assert {line["pid"] for line in journal(tmp_path)} - {target}


def test_an_item_that_kills_its_workers_spares_those_of_its_batch(tmp_path):
    """Several requests share a batch. After a crash, each item is retried alone, and only the cause fails."""
    rewards = {MOODY: {"max_batch": 8, "max_wait_ms": 300, "options": {"journal": str(tmp_path / "journal")}}}
    with serving(tmp_path, rewards) as (_, client):
        for i, prompt in enumerate(["a", "b", "die", "c"]):
            client.submit(a_batch([prompt], prefix=f"r{i}-"))
        why = "its worker died (killed by SIGKILL) (3 attempts)"
        assert failures(client.wait(), MOODY) == {"r0-0": None, "r1-0": None, "r2-0": why, "r3-0": None}
    batches = [line["ids"] for line in journal(tmp_path)]
    assert len(batches[0]) > 1
    assert batches.count(["r2-0"]) == 2


def test_a_full_queue_is_waited_for(tmp_path):
    options = {"seconds": 0.05}
    with serving(tmp_path, {BRIGHTNESS: {"max_batch": 1, "max_waiting": 3, "options": options}, OTHER: {}}) as (
        _,
        client,
    ):
        client.submit(a_batch(["a"] * 20))
        scores = client.wait()
    for reward in (BRIGHTNESS, OTHER):
        assert failures(scores, reward) == {f"s{i}": None for i in range(20)}
