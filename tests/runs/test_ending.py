"""What result.json contains, and which result it has if the main thread and the heartbeat thread both end the run."""

import contextlib
import datetime
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from each_case import check_each
from wfm_ds.distributed.world import World
from wfm_ds.errors import RunError, UserError
from wfm_ds.runs.output_folder import RunStart, claim_folder
from wfm_ds.runs.shutdown import RunOutcome, RunShutdown, discard_new_run, record_run, watch_ranks

ALONE = World(0, 1, 0, torch.device("cpu"), None)


@pytest.fixture
def recipe(tmp_path):
    run, checkpoint = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(storage=None)
    return SimpleNamespace(run=run, checkpoint=checkpoint, logging=SimpleNamespace(page=True))


LOOP = SimpleNamespace(step=3, metrics={"loss": 0.5})
EXPORTS = SimpleNamespace(artifacts={"lora": "there"}, finish_push=lambda: None)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def fail(error):
    raise error


def test_the_result_has_times_finite_metrics_and_the_exports(recipe, tmp_path):
    ending, odd = RunShutdown(ALONE), {"a": float("nan"), "b": float("-inf"), "c": 0.75}
    ending.start_time -= datetime.timedelta(hours=2)
    with record_run(ending, recipe, None, LOOP, EXPORTS) as record:
        record.record_outcome(RunOutcome("finished", 30, odd, "no samples"))
    said = result(tmp_path)
    assert datetime.datetime.fromisoformat(said.pop("started")) == ending.start_time.replace(microsecond=0)
    finished = datetime.datetime.fromisoformat(said.pop("finished")) - ending.start_time
    assert said.pop("seconds") == pytest.approx(finished.total_seconds(), abs=1.0)
    assert said == {
        **{"status": "finished", "step": 30, "message": "no samples"},
        **{"metrics": {"a": None, "b": None, "c": 0.75}, "artifacts": EXPORTS.artifacts},
    }


def test_the_first_of_two_failures_is_recorded(recipe, tmp_path):
    ending = RunShutdown(ALONE)

    def both():
        heartbeat = threading.Thread(target=ending.handle_fault, args=["rank 1 is gone"])
        heartbeat.start()
        heartbeat.join()
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed"), record_run(ending, recipe, None, LOOP, EXPORTS):
        both()
    said = result(tmp_path)
    assert (said["status"], said["step"], said["message"]) == ("failed", 3, "rank 1 is gone")
    assert (said["metrics"], said["artifacts"]) == ({"loss": 0.5}, {"lora": "there"})


@check_each(
    "error, statuses", [(None, ["finished"]), (RunError("no progress"), ["failed"]), (OSError("on this rank only"), [])]
)
def test_the_hub_is_waited_for_after_the_result(recipe, error, statuses):
    pushed, folder = [], recipe.run.output_dir
    exports = SimpleNamespace(artifacts={}, finish_push=lambda: pushed.append(result(folder)["status"]))
    expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with expected, record_run(RunShutdown(ALONE), recipe, None, LOOP, exports) as record:
        if error:
            raise error
        record.record_outcome(RunOutcome("finished", 3))
    assert pushed == statuses


def test_a_rank_that_dies_during_the_last_upload_changes_no_result(recipe, tmp_path):
    ending = RunShutdown(ALONE)
    (tmp_path / "recipe.yaml").write_text("mine")
    claim_folder(tmp_path)
    exports = SimpleNamespace(artifacts={}, finish_push=lambda: ending.handle_fault("rank 1 is gone"))
    outer = ending.use_recorder(discard_new_run(tmp_path, RunStart()))
    with outer, record_run(ending, recipe, None, LOOP, exports) as record:
        record.record_outcome(RunOutcome("finished", 3))
    assert result(tmp_path)["status"] == "finished"
    assert (tmp_path / "recipe.yaml").exists()


def test_a_failure_is_recorded_by_the_innermost_context_alone(recipe, tmp_path):
    ending = RunShutdown(ALONE)
    (tmp_path / "recipe.yaml").write_text("mine")
    claim_folder(tmp_path)
    loop = record_run(ending, recipe, None, LOOP, EXPORTS)
    with pytest.raises(RunError), ending.use_recorder(discard_new_run(tmp_path, RunStart())), loop:
        fail(RunError("nothing is finished"))
    assert result(tmp_path)["message"] == "nothing is finished"
    assert '"status":"failed","message":"nothing is finished"' in (tmp_path / "page" / "data.js").read_text()
    assert (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize(("start", "stays"), [(RunStart(), False), (RunStart(checkpoint="there", step=2), True)])
def test_a_new_run_that_fails_before_its_first_step_leaves_the_folder_as_it_was(tmp_path, start, stays):
    claim_folder(tmp_path)
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(UserError), RunShutdown(ALONE).use_recorder(discard_new_run(tmp_path, start)):
        fail(UserError("no such reward"))
    assert (tmp_path / "recipe.yaml").exists() is stays
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(("error", "code"), [(UserError("mend it"), 2), (RunError("over"), 1)])
def test_reported_errors_end_with_an_exit_code(error, code, capsys):
    with pytest.raises(SystemExit) as left, watch_ranks(ALONE, stuck_s=60.0):
        fail(error)
    assert left.value.code == code
    assert capsys.readouterr().err == ("error: mend it\n" if code == 2 else "")


def test_unexpected_errors_are_raised_unchanged():
    with pytest.raises(ZeroDivisionError), watch_ranks(ALONE, stuck_s=60.0):
        fail(ZeroDivisionError())
