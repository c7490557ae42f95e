"""Starts in a folder where another process finishes the run, and starts on a full disk."""

import json
import resource
import subprocess
import sys
from functools import partial

import pytest

from faults.processes import until
from faults.small_runs import DEADLINE_S, run_training
from multi_rank.resuming import ROOT, STEPS, records, settings, train_on_rank
from wfm_ds.demos.digits_data import write_digits


@pytest.fixture
def run(tiny_pipelines, tmp_path):
    write_digits(tmp_path / "digits")
    changes = ["checkpoint.every=1", "logging.tensorboard=false"]
    there = {"model": tiny_pipelines("sd3"), "digits": tmp_path / "digits", "changes": changes}
    return settings("sft lora zero2", tmp_path / "out", **there)


def train_while_another_start_finishes(recipe, overrides):
    """Start training, and let another process finish the run while this one loads its model."""
    from wfm_ds.training import diffusion_builder

    load, ended = diffusion_builder.load_model, []

    def load_slowly(*arguments):
        ended.append(run_training(recipe, overrides).returncode)
        return load(*arguments)

    diffusion_builder.load_model = load_slowly
    try:
        return train_on_rank(recipe, overrides) | {"other": ended}
    finally:
        diffusion_builder.load_model = load


def test_a_second_start_does_not_change_a_run_finished_in_the_meantime(one_rank, run, tmp_path):
    one_rank.run(train_on_rank, **run, stop_at=2)
    [done] = one_rank.run(train_while_another_start_finishes, **run)
    assert (done["other"], done["status"], done["step"]) == ([0], "finished", STEPS)
    assert [line["step"] for line in records(tmp_path / "out")][-1] == STEPS
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "finished"


def test_a_full_disk_at_the_first_write_is_a_one_line_error(run, tmp_path):
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))
    ended = run_training(**run, limit=full)
    assert ended.returncode == 2, ended.stderr
    [error] = [line for line in ended.stderr.splitlines() if not line.startswith(("[", " "))][-1:]
    assert error.startswith(f"error: run.output_dir {tmp_path / 'out'} cannot be written ([Errno 27]")
    assert "Traceback" not in ended.stderr
    ended = run_training(**run)
    assert ended.returncode == 0, ended.stderr


def test_a_full_disk_after_the_first_step_is_a_one_line_error_and_the_run_resumes(run, tmp_path):
    recipe, overrides = run["recipe"], [*run["overrides"], "run.steps=40", "checkpoint.every=1000"]
    words = [sys.executable, "-m", "wfm_ds.train", recipe, *overrides]
    started = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        until(lambda: started.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0), DEADLINE_S)
        # The limit applies to every file; the rank's log is almost as large as the metrics.
        largest = metrics.stat().st_size + 2000
        resource.prlimit(started.pid, resource.RLIMIT_FSIZE, (largest, largest))
        _, said = started.communicate(timeout=DEADLINE_S)
    finally:
        started.kill()
    assert started.returncode == 2, said
    [error] = [line for line in said.splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: run.output_dir {tmp_path / 'out'}: metrics cannot be written (File too large)")
    assert "Traceback" not in said
    [done] = [json.loads((tmp_path / "out" / "result.json").read_text())]
    assert (done["status"], "metrics cannot be written" in done["message"]) == ("failed", True)
    assert run_training(recipe, overrides).returncode == 0
    assert sorted({line["step"] for line in records(tmp_path / "out")}) == list(range(41))
