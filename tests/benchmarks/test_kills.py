"""The kill study (benchmarks/kills.py) detects wrong resumes. tests/faults/test_kills.py runs a small study."""

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.forked import AtFile, AtTime, RanksExit, is_expected_exit
from benchmarks.kills import STEPS, KilledRun, StudyError, draw_moment, read_metrics
from wfm_ds.checkpoint import store


def metrics_line(step, loss):
    return json.dumps({"step": step, "loss": loss, "time": "12:00", "time/train": 0.1 * step, "x/seconds": 3}) + "\n"


def write_checkpoint(run, step):
    folder = run.checkpoints / f"step_{step}"
    folder.mkdir(parents=True)
    save_file({"train.0": torch.full((3,), float(step))}, folder / "wfm_rank00000.safetensors")
    marker = {"step": step, "world_size": 1, "facts": {}, "files": {}}
    (folder / store.COMPLETE).write_text(json.dumps(marker))


@pytest.fixture
def run(tmp_path):
    """Return a function `run(name)` that writes checkpoints and metrics to tmp_path/name."""

    def make_run(name):
        made = KilledRun(tmp_path / name, tmp_path / "recipe.yaml", [])
        made.folder.mkdir()
        (made.folder / "metrics.jsonl").write_text(
            "".join(metrics_line(step, step / 2) for step in range(1, STEPS + 1))
        )
        for step in range(1, STEPS + 1):
            write_checkpoint(made, step)
        return made

    return make_run


def test_metrics_without_times_are_compared_and_a_lost_checkpoint_is_detected(run):
    whole, killed = run("whole"), run("killed")
    want = read_metrics(whole.folder)
    assert want[0] == {"step": 1, "loss": 0.5}
    metrics = killed.folder / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace("12:00", "13:00")[:-9])  # killed within the last line
    assert read_metrics(killed.folder) == want[:-1]
    assert killed.examine(want)["steps to do again, at most"] == 0
    metrics.write_text(metrics_line(1, 0.5) + metrics_line(2, 1.01))
    with pytest.raises(StudyError, match="lines of metrics differ from the undisturbed run"):
        killed.examine(want)
    metrics.write_text(text)
    (killed.checkpoints / "step_4" / store.COMPLETE).unlink()
    with pytest.raises(StudyError, match="the checkpoint of step 4 is lost"):
        killed.examine(want)


def test_different_tensors_and_files_are_detected(run):
    whole, killed = run("whole"), run("killed")
    killed.require_equal(whole)
    last = killed.checkpoints / f"step_{STEPS}"
    for number, message in enumerate(
        (r"tensors differ from .* in checkpoints/step_4/.*00000", r"files differ .*00001")
    ):
        save_file({"train.0": torch.ones(3)}, last / f"wfm_rank0000{number}.safetensors")
        with pytest.raises(StudyError, match=message):
            killed.require_equal(whole)


@pytest.mark.parametrize(("said", "right"), [([], True), ([3], True), ([2, 3], True), ([3, 2], False), ([1], False)])
def test_a_start_from_another_checkpoint_is_detected(run, said, right):
    """A start that was killed early logs nothing."""
    killed = run("killed")
    killed.steps = [0, 2, 3]
    (killed.folder / "logs").mkdir()
    text = "".join(f"rank 0 INFO wfm_ds.monitoring.monitor: continues after step {step} from there\n" for step in said)
    (killed.folder / "logs" / "rank_0.log").write_text(text)
    if right:
        killed.require_right_start()
        return
    with pytest.raises(StudyError, match="continued after the steps"):
        killed.require_right_start()


@pytest.mark.parametrize(
    ("codes", "moment", "legitimate"),
    [
        ((0, 0), None, True),
        ((-9, -9), AtFile(0, 1), True),
        ((0, -9), AtTime(1.0), True),
        ((1, -9), AtTime(1.0), True),
        ((0, -9), AtFile(0, 1), False),
        ((0, 1), AtTime(1.0), False),
        ((2, -9), AtTime(1.0), False),
        ((-11, -9), AtTime(1.0), False),
    ],
)
def test_ranks_end_alike_unless_a_time_was_drawn_at_which_some_had_left(codes, moment, legitimate):
    assert is_expected_exit(codes, moment) is legitimate
    assert RanksExit(codes, 1.0, (0, 0)).killed is (-9 in codes)


def test_half_of_the_instants_are_file_operations_that_a_run_does():
    draw, whole = random.Random(3), RanksExit((0, 0), 7.0, (30, 5))
    moments = [draw_moment(draw, number, 400, whole) for number in range(400)]
    at_file, at_time = moments[::2], moments[1::2]
    assert {type(moment) for moment in at_file} == {AtFile}
    assert {type(moment) for moment in at_time} == {AtTime}
    assert {(m.rank, m.number) for m in at_file} >= {(0, 1), (0, 30), (1, 1), (1, 5)}
    assert all(1 <= m.number <= whole.file_operations[m.rank] for m in at_file)
    assert 0 <= min(m.seconds for m in at_time) < 1 < 6 < max(m.seconds for m in at_time) <= 7
    assert draw_moment(draw, 400, 400, whole) is None
