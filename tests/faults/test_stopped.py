"""A reward service or a trainer that is stopped (SIGSTOP) for longer than a deadline, and then resumed."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from faults.processes import MIB, PATIENCE_S, go_on, modest, read_lines, stop, until, wait
from reward_http import serving
from reward_samples import media_batch
from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient

TRAINER = Path(__file__).parent / "trainer.py"
BRIGHTNESS = "probe_rewards:Brightness"


pytestmark = pytest.mark.usefixtures("probes")


def scored(folder):
    """Return the ids of the samples in the order in which scoring started."""
    return [sample_id for line in read_lines(folder / "journal") for sample_id in line["ids"]]


def a_batch(count, prefix):
    return media_batch(np.zeros((count, 8, 8, 3), np.uint8), prefix=prefix)


@contextmanager
def brightness(folder, seconds, **pipes):
    """Start a service with one worker that takes `seconds` per image. Yield the service's process."""
    options = {"journal": str(folder / "journal"), "seconds": seconds}
    config = {"pipes": pipes, "rewards": {BRIGHTNESS: {"max_batch": 1, "options": options}}}
    with serving(folder, config) as (process, _):
        yield process


@contextmanager
def training(folder, timeout_s, count, size):
    command = [sys.executable, str(TRAINER), str(folder), str(timeout_s), str(count), str(size)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "submitted\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("timeout_s", "lost_after_s", "says"),
    [(2.0, 60.0, f"timeout after 2 s in {BRIGHTNESS}"), (PATIENCE_S, 2.0, "reward service lost: ")],
    ids=["deadline of a sample", "silence of the service"],
)
def test_a_stopped_service_fails_its_samples_in_time_and_late_answers_are_ignored(
    tmp_path, timeout_s, lost_after_s, says
):
    options = {"journal": str(tmp_path / "journal"), "seconds": 0.5}
    functions = [{"name": BRIGHTNESS, "max_batch": 1, "options": options}]
    recipe = RewardRecipe(functions=functions, timeout_s=timeout_s)
    with RewardService(recipe, tmp_path) as service:
        client = RewardClient(service.endpoint, recipe, "run", "rank0", lost_after_s=lost_after_s)
        try:
            client.submit(a_batch(10, "a"))
            until(lambda: scored(tmp_path))
            stop(service.pid)
            started = time.monotonic()
            scores = client.wait()
            assert time.monotonic() - started < PATIENCE_S / 2
            failures = {sample_id: of_sample[BRIGHTNESS].failure for sample_id, of_sample in scores.items()}
            assert failures.keys() == {f"a{i}" for i in range(10)}
            assert failures["a9"].startswith(says)
            go_on(service.pid)

            def next_step():  # late answers for the last step may arrive first
                client.submit(a_batch(2, "b"))
                scores = client.wait()
                assert scores.keys() == {"b0", "b1"}
                return all(of_sample[BRIGHTNESS].failure is None for of_sample in scores.values())

            until(next_step)
        finally:
            client.close()


def test_a_trainer_stopped_beyond_its_deadline_gets_all_scores(tmp_path):
    with brightness(tmp_path, 0.1), training(tmp_path, 6, 4, 8) as trainer:
        stop(trainer.pid)
        wait(7.0)
        go_on(trainer.pid)
        said, _ = trainer.communicate(timeout=PATIENCE_S)
    assert json.loads(said) == dict.fromkeys(["s0", "s1", "s2", "s3"])


def test_a_wholly_suspended_job_continues(tmp_path):
    """The trainer resumes first. No other process answers yet, and its deadline has passed in wall-clock time."""
    with brightness(tmp_path, 0.1) as service, training(tmp_path, 6, 8, 8) as trainer:
        family = [p.pid for p in psutil.Process(service.pid).children(recursive=True)]
        stop(trainer.pid, service.pid, *family)
        wait(7.0)
        go_on(trainer.pid)
        wait(0.5)
        go_on(*family, service.pid)
        said, _ = trainer.communicate(timeout=PATIENCE_S)
    assert json.loads(said) == dict.fromkeys(f"s{i}" for i in range(8))
    assert sorted(scored(tmp_path)) == [f"s{i}" for i in range(8)], "each was scored once"


def test_a_full_service_with_a_stopped_trainer_stays_bounded_and_loses_nothing(tmp_path):
    count, size, held = 20, 300, 3
    assert held * size * size * 3 < MIB < (held + 1) * size * size * 3
    with brightness(tmp_path, 0.02, spool_mib=1) as service, modest(service):
        with training(tmp_path, PATIENCE_S, count, size) as trainer:
            until(lambda: len(scored(tmp_path)) >= 3)
            before = len(scored(tmp_path))
            stop(trainer.pid)
            wait(3.0)
            # Only samples that it held, or that were in transit, are scored.
            assert len(scored(tmp_path)) <= before + 2 * held < count
            go_on(trainer.pid)
            said, _ = trainer.communicate(timeout=PATIENCE_S)
        assert json.loads(said) == dict.fromkeys(f"s{i}" for i in range(count))
        assert sorted(scored(tmp_path)) == sorted(f"s{i}" for i in range(count)), "each was scored once"
