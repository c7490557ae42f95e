import datetime
import json

import pytest

from wfm_ds.runs.result import write_result

STARTED = datetime.datetime(2024, 5, 1, 12, 0, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))


def write(folder, **changes):
    arguments = {
        "status": "finished",
        "step": 30,
        "metrics": {"reward/total/mean": 0.75},
        "artifacts": {"lora": "safetensors/step_30/lora"},
        "started": STARTED,
    }
    return json.loads(write_result(folder, **(arguments | changes)).read_text())


def test_result_holds_what_was_reported(tmp_path):
    before = datetime.datetime.now(datetime.UTC)
    result = write(tmp_path)
    assert (result["status"], result["step"], result["message"]) == ("finished", 30, "")
    assert result["metrics"] == {"reward/total/mean": 0.75}
    assert result["artifacts"] == {"lora": "safetensors/step_30/lora"}
    assert result["started"] == "2024-05-01T10:00:00+00:00"
    assert datetime.datetime.fromisoformat(result["finished"]) >= before.replace(microsecond=0)
    assert result["seconds"] >= (before - STARTED).total_seconds() - 1e-3  # rounded to milliseconds


def test_metrics_that_are_not_finite_are_null(tmp_path):
    metrics = {"a": float("nan"), "b": float("-inf"), "c": 0.0}
    assert write(tmp_path, metrics=metrics)["metrics"] == {"a": None, "b": None, "c": 0.0}


def test_later_result_replaces_the_first(tmp_path):
    write(tmp_path)
    assert write(tmp_path, status="failed", message="out of memory")["message"] == "out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_unknown_status_is_refused_and_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="'done' is not one of finished, preempted, failed"):
        write(tmp_path, status="done")
    assert list(tmp_path.iterdir()) == []
