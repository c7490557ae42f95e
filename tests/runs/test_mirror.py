"""Mirror of a run folder on a real S3 server: which files arrive, in which order, and behavior on storage failures."""

import dataclasses
import json
import logging

import pytest

import s3
from wfm_ds.checkpoint import remote_store, store
from wfm_ds.errors import StorageError
from wfm_ds.runs import mirror
from wfm_ds.runs.mirror import SENT_FILES_NAME, Mirror
from wfm_ds.storage import transfer

STALL_S = 60.0  # a high limit: the tests do not reach it


@pytest.fixture
def address(request):
    return f"s3://{s3.BUCKET}/{request.node.name}"


@pytest.fixture
def folder(tmp_path):
    """Write the folder of a run with one checkpoint."""
    write(tmp_path, "recipe.yaml", "run: {}\n")
    write(tmp_path, "metrics.jsonl", '{"step": 1}\n')
    write(tmp_path, "logs/rank_0.log", "began\n")
    write(tmp_path, "samples/step_0/0000.png", "picture")
    write(tmp_path, "samples/.step_1.wfm-tmp/0000.png", "half")
    write(tmp_path, "reward/pipes.json", "secret")
    write(tmp_path, "notes.txt", "somebody's")
    write(tmp_path, "trackers/wandb_id", "1a2b3c")
    write(tmp_path, "trackers/mlflow.db", "a database that the run is writing")
    checkpoint(tmp_path, 1)
    return tmp_path


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(folder, step, size=1000):
    path = write(folder, f"checkpoints/step_{step}/state", f"{step}" * size).parent
    facts = {"metrics_bytes": 12}
    marker = {"step": step, "world_size": 1, "facts": facts, "files": {"state": len(f"{step}") * size}}
    write(path, store.COMPLETE, json.dumps(marker))
    return path


def copied(folder, address, keep=2, stall_s=STALL_S):
    """Copy the folder. Return the mirror and the list of missing files."""
    one = Mirror(folder, address, keep=keep)
    one.start()
    return one, one.finish(stall_s)


def test_exactly_the_files_of_the_run_are_uploaded(s3_proxy, folder, address):
    copies, missing = copied(folder, address)
    assert missing == []
    names = {
        *("recipe.yaml", "metrics.jsonl", "logs/rank_0.log", "samples/step_0/0000.png"),
        *("checkpoints/step_1/state", "checkpoints/step_1/COMPLETE", ".wfm_run.json", "trackers/wandb_id"),
    }
    assert transfer.list_objects(address).keys() == names
    write(folder, "result.json", "{}")
    copies.send_result()
    assert transfer.read_text(f"{address}/result.json") == "{}"
    found = remote_store.find_newest(f"{address}/checkpoints")
    assert (found.step, found.metadata, found.files) == (1, {"metrics_bytes": 12}, {"state": 1000})
    assert found.sha256.keys() == {"state"}


def test_a_checkpoint_is_downloaded_unchanged(s3_proxy, folder, address, tmp_path):
    copied(folder, address)
    again = tmp_path / "again"
    copies = Mirror(again, address, keep=2)
    assert copies.fetch_checkpoint(f"{address}/checkpoints/step_1") == again / "checkpoints" / "step_1"
    assert store.find_newest(again / "checkpoints").step == 1
    assert (again / "checkpoints/step_1/state").read_text() == "1" * 1000
    assert (again / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (again / "trackers/wandb_id").read_text() == "1a2b3c"  # the run continues in its trackers
    copies.start()
    assert copies.list_unverified_steps() == []  # no upload is needed
    assert copies.finish(STALL_S) == []


def test_only_new_and_changed_files_are_uploaded(s3_server, s3_proxy, folder, address):
    copied(folder, address)
    tags = {name: tag(s3_server, address, name) for name in transfer.list_objects(address)}
    write(folder, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n')
    s3_server[1].put_object(Bucket=s3.BUCKET, Key=key(address, "recipe.yaml"), Body=b"of the same size"[:8])
    s3_server[1].delete_object(Bucket=s3.BUCKET, Key=key(address, "logs/rank_0.log"))
    copied(folder, address)
    changed = {name for name in transfer.list_objects(address) if tag(s3_server, address, name) != tags[name]}
    # recipe.yaml was changed by another program to a text of the same size
    assert changed == {"metrics.jsonl", "recipe.yaml"}
    assert transfer.read_text(f"{address}/logs/rank_0.log") == "began\n"
    (folder / SENT_FILES_NAME).write_text("torn")
    copied(folder, address)
    again = {name for name in tags if tag(s3_server, address, name) != tags[name]}
    assert again == {"metrics.jsonl"}


def key(address, name):
    return f"{address.removeprefix(f's3://{s3.BUCKET}/')}/{name}"


def tag(s3_server, address, name):
    return s3_server[1].head_object(Bucket=s3.BUCKET, Key=key(address, name))["ETag"]


def stored_steps(address):
    return {name.split("/")[1] for name in transfer.list_objects(address) if "checkpoints/" in name}


def test_a_part_of_the_model_is_sent_once_and_copied_within_the_storage(s3_server, s3_proxy, folder, address, caplog):
    part = write(folder, "base/vae.safetensors", "unchanged")
    for step in (1, 2):
        export = folder / "safetensors" / f"step_{step}"
        export.mkdir(parents=True)
        (export / "vae.safetensors").hardlink_to(part)
    with caplog.at_level(logging.INFO, logger="werkzeug"):
        copied(folder, address)
    puts = [r.getMessage() for r in caplog.records if "PUT " in r.getMessage() and "vae" in r.getMessage()]
    assert len(puts) == 2
    assert s3_proxy.copies == 1
    for step in (1, 2):
        assert transfer.read_text(f"{address}/safetensors/step_{step}/vae.safetensors") == "unchanged"


def test_a_part_whose_first_copy_was_removed_is_sent_again(s3_server, s3_proxy, folder, address):
    part = write(folder, "safetensors/step_1/vae/model.safetensors", "weights" * 100)
    other = folder / "safetensors/step_2/vae/model.safetensors"
    other.parent.mkdir(parents=True)
    other.hardlink_to(part)
    copies = Mirror(folder, address, keep=2)
    copies._send_file("safetensors/step_1/vae/model.safetensors")
    s3_server[1].delete_object(Bucket=s3.BUCKET, Key=key(address, "safetensors/step_1/vae/model.safetensors"))
    copies._send_file("safetensors/step_2/vae/model.safetensors")
    assert transfer.read_text(f"{address}/safetensors/step_2/vae/model.safetensors") == "weights" * 100


def test_a_failing_file_does_not_block_the_others(s3_proxy, folder, address, monkeypatch):
    upload = transfer.upload_file

    def refuse_one(path, target, **options):
        if path.name == "0000.png":
            raise StorageError("this one is not taken")
        return upload(path, target, **options)

    monkeypatch.setattr(transfer, "upload_file", refuse_one)
    copies, missing = copied(folder, address, stall_s=3)
    assert missing == ["samples/step_0/0000.png"]
    assert copies.failure == "this one is not taken"
    assert "logs/rank_0.log" in transfer.list_objects(address)


def test_repeated_uploads_do_not_delay_the_run(s3_proxy, folder, address, monkeypatch):
    put = transfer.put_object

    def refuse_markers(content, target):
        if target.endswith(store.COMPLETE):
            raise StorageError("no markers here")
        put(content, target)

    monkeypatch.setattr(transfer, "put_object", refuse_markers)
    monkeypatch.setattr(mirror, "FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(mirror, "LAST_RETRY_S", 0.1)
    copies, missing = copied(folder, address, stall_s=3)  # each try sends the whole checkpoint in less than 3 s
    assert "checkpoints/step_1" in missing
    assert copies.failure == "no markers here"


def test_a_checkpoint_without_its_metrics_is_not_sent(s3_proxy, folder, address):
    (folder / "metrics.jsonl").unlink()
    copies, missing = copied(folder, address, stall_s=3)
    assert "checkpoints/step_1" in missing
    assert "metrics.jsonl is missing" in copies.failure
    assert remote_store.find_newest(f"{address}/checkpoints") is None


def test_older_checkpoints_are_removed_after_a_newer_one_is_complete(s3_proxy, folder, address):
    copied(folder, address, keep=1)
    copies = Mirror(folder, address, keep=1)
    checkpoint(folder, 2)
    assert list(copies.list_unverified_steps()) == [2]
    copies.start()
    assert copies.finish(STALL_S) == []
    assert copies.list_unverified_steps() == []
    assert stored_steps(address) == {"step_2"}


@pytest.mark.parametrize("fault", ["upload_cuts", "errors", "flips"])
@pytest.mark.slow
def test_uploads_are_repeated_until_they_succeed(s3_proxy, folder, address, fault, caplog, monkeypatch):
    monkeypatch.setattr(transfer, "NUM_TRIES", 1)
    monkeypatch.setattr(mirror, "FIRST_RETRY_S", 0.01)
    checkpoint(folder, 2, size=50_000)
    setattr(s3_proxy, fault, 4)
    with caplog.at_level(logging.INFO, logger="wfm_ds"):
        assert copied(folder, address)[1] == []
    assert s3_proxy.num_failed == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1  # one warning, independent of the number of retries
    assert "retrying; checkpoints stay in" in warnings[0]
    assert f"{address} accepts uploads again" in caplog.text
    assert remote_store.find_newest(f"{address}/checkpoints").step == 2


@pytest.mark.slow
def test_a_storage_that_fails_midway_keeps_its_last_complete_checkpoint(
    s3_proxy, folder, address, tmp_path, monkeypatch
):
    copied(folder, address)
    monkeypatch.setattr(transfer, "NUM_TRIES", 1)
    checkpoint(folder, 2, size=50_000)
    s3_proxy.gone_at, s3_proxy.pass_first = b"/checkpoints/step_2/", 1  # COMPLETE is not uploaded
    copies, missing = copied(folder, address, stall_s=5.0)
    assert "checkpoints/step_2" in missing
    assert f"{address}/" in copies.failure
    assert list(copies.list_unverified_steps()) == [2]
    s3_proxy.come_back()
    assert remote_store.find_newest(f"{address}/checkpoints").step == 1
    assert "checkpoints/step_2/state" in transfer.list_objects(address)
    assert copied(folder, address)[1] == []
    assert remote_store.find_newest(f"{address}/checkpoints").step == 2


def test_a_checkpoint_is_replaced_as_a_whole(s3_server, s3_proxy, folder, address):
    """A checkpoint never mixes files of two versions."""
    copied(folder, address)
    seen = []

    def look():
        seen.append(remote_store.read_checkpoint(f"{address}/checkpoints/step_1"))

    checkpoint(folder, 1)
    remote_store.publish_checkpoint(
        store.read_checkpoint(folder / "checkpoints/step_1"), f"{address}/checkpoints/step_1", before_complete=look
    )
    assert seen == [None]
    assert remote_store.read_checkpoint(f"{address}/checkpoints/step_1").step == 1


@pytest.mark.parametrize("damage", ["missing file", "shorter file", "torn COMPLETE"])
@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(s3_server, s3_proxy, folder, address, damage, caplog):
    checkpoint(folder, 2)
    copied(folder, address)
    name = {"torn COMPLETE": "COMPLETE"}.get(damage, "state")
    if damage == "missing file":
        s3_server[1].delete_object(Bucket=s3.BUCKET, Key=key(address, f"checkpoints/step_2/{name}"))
    else:
        s3_server[1].put_object(Bucket=s3.BUCKET, Key=key(address, f"checkpoints/step_2/{name}"), Body=b"{")
    assert remote_store.find_newest(f"{address}/checkpoints").step == 1
    assert "step_2 is damaged or incomplete and is skipped" in caplog.text


def test_a_checkpoint_with_another_byte_is_refused_and_leaves_nothing(s3_server, s3_proxy, folder, address, tmp_path):
    copied(folder, address)
    s3_server[1].put_object(Bucket=s3.BUCKET, Key=key(address, "checkpoints/step_1/state"), Body=b"1" * 999 + b"2")
    with pytest.raises(StorageError, match="is damaged: its SHA-256"):
        Mirror(tmp_path / "again", address, keep=2).fetch_checkpoint(f"{address}/checkpoints/step_1")
    assert store.find_newest(tmp_path / "again" / "checkpoints") is None


def test_a_file_name_outside_the_checkpoint_is_refused(s3_proxy, folder, address, tmp_path):
    copied(folder, address)
    transfer.put_object(b"stray", f"{address}/stray")
    stray = dataclasses.replace(remote_store.find_newest(f"{address}/checkpoints"), files={"../../stray": 5})
    with pytest.raises(StorageError, match=r"names the file \.\./\.\./stray outside of its folder"):
        remote_store.fetch_checkpoint(stray, tmp_path / "again" / "step_1")
    assert not (tmp_path / "stray").exists()


def test_clearing_removes_the_run_and_nothing_else(s3_proxy, folder, address):
    copied(folder, address)
    transfer.put_object(b"somebody's", f"{address}/notes.txt")
    Mirror(folder, address, keep=2).clear()
    assert transfer.list_objects(address).keys() == {".wfm_run.json", "notes.txt"}


@pytest.mark.slow
def test_clearing_without_a_record_removes_nothing(s3_proxy, folder, address):
    copied(folder, address)
    transfer.remove_objects([f"{address}/.wfm_run.json"])
    before = transfer.list_objects(address)
    Mirror(folder, address, keep=2).clear()
    assert transfer.list_objects(address) == before


def test_the_metrics_of_attempts_without_a_checkpoint_are_fetched_and_kept(s3_proxy, folder, address, tmp_path):
    write(folder, "earlier/1/metrics.jsonl", "first")
    copied(folder, address)
    again = tmp_path / "again"
    Mirror(again, address, keep=2).fetch_metrics()
    files = {path.relative_to(again).as_posix(): path.read_text() for path in again.rglob("*") if path.is_file()}
    assert files == {"earlier/1/metrics.jsonl": "first", "metrics.jsonl": '{"step": 1}\n'}


def test_repeated_parts_do_not_count_as_progress(tmp_path):
    copies = Mirror(tmp_path, "s3://nobodys/run", keep=1)
    cases = [("a", [10], True), ("a", [4, 6], False), ("a", [4, 6, 1], True), ("b", [0], True)]
    for name, chunks, is_progress in cases:
        copies._last_progress_s = 0.0
        moved = copies._byte_counter(name)
        for num_bytes in chunks:
            moved(num_bytes)
        assert (copies._last_progress_s > 0) == is_progress, (name, chunks)


def test_a_storage_ahead_of_the_folder_is_not_changed(s3_proxy, folder, address, tmp_path):
    ahead = tmp_path / "ahead"
    write(ahead, "recipe.yaml", "run: {}\n")
    write(ahead, "metrics.jsonl", '{"step": 3}\n')
    checkpoint(ahead, 3)
    copies, _ = copied(ahead, address)
    write(ahead, "result.json", "{}")
    copies.send_result()
    before = transfer.list_objects(address)
    with pytest.raises(StorageError, match="has a checkpoint of step 3, newer than all in"):
        Mirror(folder, address, keep=1).start()
    assert transfer.list_objects(address) == before


def test_pruning_keeps_complete_checkpoints_newer_than_the_runs(s3_server, s3_proxy, folder, address):
    for step in (2, 3, 4):
        checkpoint(folder, step)
    copied(folder, address, keep=4)
    s3_server[1].delete_object(Bucket=s3.BUCKET, Key=key(address, "checkpoints/step_3/state"))
    remote_store.prune_checkpoints(f"{address}/checkpoints", newest=2, keep=1)
    assert stored_steps(address) == {"step_2", "step_4"}
