"""Runs are uploaded to S3 and resume from there alone. The S3 server runs in this process, the ranks in others."""

import json
from pathlib import Path
from unittest import mock

import pytest

import s3
from multi_rank.resuming import STEPS, assert_equal_runs, settings, train_on_rank, weights
from wfm_ds.checkpoint import remote_store, store
from wfm_ds.recipe import file as recipe_file
from wfm_ds.runs.mirror import Mirror
from wfm_ds.storage import transfer


@pytest.fixture
def server(monkeypatch):
    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # monkeypatch restores it after the test
    with s3.s3_server() as (url, _):
        s3.use(url)
        yield url


def train_stored(url, **arguments):
    import s3 as here

    here.use(url)
    return train_on_rank(**arguments)


def wait_for_main(refuse):
    """Return the result of `run_without_timeout` while rank 0 takes longer than several polls of the other ranks."""
    import threading

    from wfm_ds.distributed import world
    from wfm_ds.errors import UserError

    signs, one, enough = [], world.World.join(), threading.Event()
    reduce = world.World.any_rank

    def counted(self, flag):
        signs.append(flag)
        if len(signs) == 3:
            enough.set()
        return reduce(self, flag)

    def work():
        enough.wait(60)
        if refuse:
            raise UserError("no")
        return [1]

    with mock.patch.object(world, "WAIT_INTERVAL_S", 0.05), mock.patch.object(world.World, "any_rank", counted):
        try:
            return [one.run_without_timeout(work), len(signs) > 3]
        except UserError as error:
            return [str(error), len(signs) > 3]


def test_all_ranks_wait_for_work_of_rank_0(two_ranks):
    assert two_ranks.run(wait_for_main, refuse=False) == [[[1], True], [None, True]]
    assert two_ranks.run(wait_for_main, refuse=True) == [["no", True], ["no", True]]


def local_files(folder):
    """Return the files of a run that are uploaded: no reward logs, hidden files, LATEST, or .ok files."""
    files = [f for f in folder.rglob("*") if f.is_file() and f.relative_to(folder).parts[0] != "reward"]
    names = {f.relative_to(folder).as_posix(): f for f in files}
    return {name: f for name, f in names.items() if not name.startswith(".") and not name.endswith(("LATEST", ".ok"))}


def stored_bytes(address, name, size, folder):
    transfer.download_file(f"{address}/{name}", folder / "back", size=size)
    return (folder / "back").read_bytes()


def test_a_run_is_uploaded_and_resumes_from_s3_alone(server, two_ranks, tiny_pipelines, digits, tmp_path):
    whole, first, second, third = (tmp_path / name for name in ("whole", "first", "second", "third"))
    case = {"case": "sft lora zero2", "model": tiny_pipelines("sd3"), "digits": digits.parent}
    address = f"s3://{s3.BUCKET}/runs/digits"
    storage = [f"checkpoint.storage={address}/", "checkpoint.every=1", "checkpoint.keep=2"]
    two_ranks.run(train_on_rank, **settings(folder=whole, **case))

    two_ranks.run(train_stored, url=server, **settings(folder=first, **case, changes=storage), stop_at=3)
    stored = transfer.list_objects(address)
    assert {name.split("/")[1] for name in stored if name.startswith("checkpoints/")} == {"step_2", "step_3"}
    assert {name.split("/")[1] for name in stored if name.startswith("safetensors/")} == {"step_3"}
    result = json.loads(transfer.read_text(f"{address}/result.json"))
    assert result == json.loads((first / "result.json").read_text())
    assert (result["status"], result["storage"]) == ("preempted", {"address": address, "missing": [], "reason": ""})
    same = ("checkpoints/", "safetensors/", "samples/", "tensorboard/", "metrics.jsonl", "recipe.yaml", "logs/rank_1")
    here = {name: file for name, file in local_files(first).items() if name.startswith(same)}
    assert here.keys() == {name for name in stored if name.startswith(same)}
    for name, file in here.items():
        if not name.endswith("COMPLETE"):  # the stored COMPLETE has additional digests
            assert stored_bytes(address, name, stored[name], tmp_path) == file.read_bytes(), name

    two_ranks.run(train_stored, url=server, **settings(folder=second, **case, changes=storage))
    assert_equal_runs(second, whole)
    stored = transfer.list_objects(address)
    assert {name.split("/")[1] for name in stored if name.startswith("safetensors/")} == {"step_3", f"step_{STEPS}"}
    assert remote_store.find_newest(f"{address}/checkpoints").step == STEPS
    assert json.loads(transfer.read_text(f"{address}/result.json"))["status"] == "finished"

    for done in two_ranks.run(train_stored, url=server, **settings(folder=third, **case, changes=storage)):
        assert (done["status"], done["step"]) == ("finished", STEPS)
    assert not third.exists()  # the run was already finished

    begin = [f"run.resume={address}/checkpoints/step_3", "checkpoint.storage=null", "checkpoint.every=1"]
    two_ranks.run(train_stored, url=server, **settings(folder=third, **case, changes=begin))
    assert not (third / "fetched").exists()
    ours, theirs = weights(third, STEPS), weights(whole, STEPS)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


def leave(folder, run, steps, **result):
    """Write the folder of a run with the given checkpoints. Without `result` the run is unfinished."""
    text = recipe_file.dump_recipe(recipe_file.load_recipe(Path(run["recipe"]), run["overrides"]))
    files = {"recipe.yaml": text, "metrics.jsonl": '{"step": 1}\n' * max(steps)}
    for step in steps:
        marker = {"step": step, "world_size": 1, "facts": {"metrics_bytes": 12}, "files": {"recipe.yaml": len(text)}}
        files[f"checkpoints/step_{step}/recipe.yaml"] = text
        files[f"checkpoints/step_{step}/{store.COMPLETE}"] = json.dumps(marker)
    if result:
        files["result.json"] = json.dumps(result)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def copy(folder, address):
    copies = Mirror(folder, address, keep=2)
    copies.start()
    assert copies.finish(60.0) == []
    if (folder / "result.json").exists():
        copies.send_result()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (((4, 5), {"status": "preempted", "step": 5}), ((6, 8), {"status": "finished", "step": 8})),
        (((6, 8), {"status": "finished", "step": 8}), ((14, 16), {})),  # as if run.steps were 20
    ],
    ids=["preempted", "finished"],
)
def test_a_start_with_an_older_folder_leaves_the_storage_unchanged(server, one_rank, tmp_path, old, new):
    """A run stops on machine A and continues on B from the storage. Then the same command starts on A again."""
    address = f"s3://{s3.BUCKET}/{tmp_path.name}"
    changes = [f"checkpoint.storage={address}", "checkpoint.keep=2", "run.steps=8"]
    there = {"model": tmp_path / "model", "digits": tmp_path, "changes": changes}
    runs = {name: settings("sft lora zero2", tmp_path / name, **there) for name in "AB"}
    leave(tmp_path / "A", runs["A"], old[0], **old[1])
    copy(tmp_path / "A", address)
    leave(tmp_path / "B", runs["B"], new[0], **new[1])
    transfer.remove_objects([f"{address}/result.json"])
    copy(tmp_path / "B", address)
    before = {name: transfer.read_text(f"{address}/{name}") for name in transfer.list_objects(address)}
    result = (tmp_path / "A" / "result.json").read_text()

    [done] = one_rank.run(train_stored, url=server, **runs["A"])
    assert done["status"] == "finished"
    assert {name: transfer.read_text(f"{address}/{name}") for name in transfer.list_objects(address)} == before
    assert (tmp_path / "A" / "result.json").read_text() == result
