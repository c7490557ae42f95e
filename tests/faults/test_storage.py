"""Remote storage that fails during a run: the run continues, reports missing files, and the next start uploads them."""

import json

import pytest

import s3
from faults.small_runs import run_training
from multi_rank.resuming import settings
from wfm_ds.checkpoint import remote_store, store
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.storage import transfer


@pytest.fixture
def proxy(monkeypatch):
    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # restores the original value after the test
    with s3.s3_server() as (url, _):
        one = s3.FaultyProxy(url)
        s3.use(one.url)
        yield one
        one.close()


@pytest.mark.long
def test_a_run_survives_failing_storage_and_the_next_start_uploads_the_rest(proxy, tiny_pipelines, tmp_path):
    out, address = tmp_path / "out", f"s3://{s3.BUCKET}/run"
    write_digits(tmp_path / "digits")
    changes = [f"checkpoint.storage={address}", "checkpoint.storage_timeout_s=20", "checkpoint.keep=1"]
    run = settings(
        "sft lora zero2",
        out,
        model=tiny_pipelines("sd3"),
        digits=tmp_path / "digits",
        changes=[*changes, "checkpoint.every=1", "run.steps=3", "logging.console=true"],
    )
    proxy.gone_at, proxy.pass_first = b"/checkpoints/", 1
    ended = run_training(**run)
    assert ended.returncode == 1, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "is incomplete (" in line]
    assert len(said) == 1
    assert f"exist only in {out}; run the same command again to copy them" in said[0]
    result = json.loads((out / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 3)
    assert "checkpoints/step_3" in result["storage"]["missing"]
    # All checkpoints are kept despite checkpoint.keep=1, because none of them has been uploaded.
    assert sorted(store.list_steps(out / "checkpoints")) == [1, 2, 3]
    assert all(store.read_checkpoint(out / "checkpoints" / f"step_{step}") for step in (1, 2, 3))
    proxy.come_back()
    assert remote_store.find_newest(f"{address}/checkpoints") is None
    assert any(name.startswith("checkpoints/") for name in transfer.list_objects(address))  # an incomplete upload

    # A longer timeout, for a busy machine.
    ended = run_training(run["recipe"], [*run["overrides"], "checkpoint.storage_timeout_s=60"])
    assert ended.returncode == 0, ended.stderr
    assert json.loads((out / "result.json").read_text())["storage"]["missing"] == []
    assert transfer.read_text(f"{address}/result.json") == (out / "result.json").read_text()
    assert remote_store.find_newest(f"{address}/checkpoints").step == 3
    assert store.list_steps(out / "checkpoints") == [3]


@pytest.mark.long
def test_a_refused_write_to_the_storage_is_an_error_before_the_run(proxy, tiny_pipelines, tmp_path):
    out = tmp_path / "out"
    write_digits(tmp_path / "digits")
    run = settings(
        "sft lora zero2",
        out,
        model=tiny_pipelines("sd3"),
        digits=tmp_path / "digits",
        changes=["checkpoint.storage=s3://nobodys/run"],
    )
    ended = run_training(**run)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: s3://nobodys/run")
    assert "the bucket does not exist" in ended.stderr
    assert not out.exists()
