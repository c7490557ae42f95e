"""Runs that are copied to S3 and continued from there alone; a real server in this process, real ranks in others."""

import json

import pytest

import s3
from distributed.resuming import STEPS, assert_equal_runs, settings, train_on_rank, weights
from wfm_ds import transfer
from wfm_ds.checkpoint import remote
from wfm_ds.data.digits import write_digits


@pytest.fixture
def server(monkeypatch):
    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # put back after the test
    with s3.s3_server() as (url, _):
        s3.use(url)
        yield url


def train_stored(url, **arguments):
    import s3 as here

    here.use(url)
    return train_on_rank(**arguments)


def wait_for_main(refuse):
    """What `patiently` gives on this rank, while rank 0 takes longer than the others wait for one sign of life."""
    import threading

    from wfm_ds import world
    from wfm_ds.errors import UserError

    signs, patience, world.PATIENCE_S = [], world.PATIENCE_S, 0.05
    one, enough = world.World.join(), threading.Event()
    reduce = type(one).any

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

    type(one).any = counted
    try:
        return [one.patiently(work), len(signs) > 3]
    except UserError as error:
        return [str(error), len(signs) > 3]
    finally:
        type(one).any, world.PATIENCE_S = reduce, patience


def test_all_ranks_wait_for_what_rank_0_does_alone(two_ranks):
    assert two_ranks.run(wait_for_main, refuse=False) == [[[1], True], [None, True]]
    assert two_ranks.run(wait_for_main, refuse=True) == [["no", True], ["no", True]]


def local_files(folder):
    """What is copied of a run: not the rewards' log, nothing hidden, and no lists that COMPLETE has taken up."""
    files = [f for f in folder.rglob("*") if f.is_file() and f.relative_to(folder).parts[0] != "reward"]
    names = {f.relative_to(folder).as_posix(): f for f in files}
    return {name: f for name, f in names.items() if not name.startswith(".") and not name.endswith(("LATEST", ".ok"))}


def stored_bytes(address, name, size, folder):
    transfer.download(f"{address}/{name}", folder / "back", size=size)
    return (folder / "back").read_bytes()


@pytest.mark.slow
def test_a_run_is_copied_and_continues_from_s3_alone(server, two_ranks, tiny_pipelines, tmp_path):
    whole, first, second, third = (tmp_path / name for name in ("whole", "first", "second", "third"))
    write_digits(tmp_path / "digits")
    case = {"case": "sft lora zero2", "model": tiny_pipelines("sd3"), "digits": tmp_path / "digits"}
    address = f"s3://{s3.BUCKET}/runs/digits"
    storage = [f"checkpoint.storage={address}/", "checkpoint.every=1", "checkpoint.keep=2"]
    two_ranks.run(train_on_rank, **settings(folder=whole, **case))

    two_ranks.run(train_stored, url=server, **settings(folder=first, **case, changes=storage), stop_at=3)
    stored = transfer.listing(address)
    assert {name.split("/")[1] for name in stored if name.startswith("checkpoints/")} == {"step_2", "step_3"}
    assert {name.split("/")[1] for name in stored if name.startswith("safetensors/")} == {"step_3"}
    result = json.loads(transfer.read_text(f"{address}/result.json"))
    assert result == json.loads((first / "result.json").read_text())
    assert (result["status"], result["storage"]) == ("preempted", {"address": address, "missing": [], "reason": ""})
    same = ("checkpoints/", "safetensors/", "samples/", "tensorboard/", "metrics.jsonl", "recipe.yaml", "logs/rank_1")
    here = {name: file for name, file in local_files(first).items() if name.startswith(same)}
    assert here.keys() == {name for name in stored if name.startswith(same)}
    for name, file in here.items():
        if not name.endswith("COMPLETE"):  # to which the storage's adds digests
            assert stored_bytes(address, name, stored[name], tmp_path) == file.read_bytes(), name

    two_ranks.run(train_stored, url=server, **settings(folder=second, **case, changes=storage))
    assert_equal_runs(second, whole)
    stored = transfer.listing(address)
    assert {name.split("/")[1] for name in stored if name.startswith("safetensors/")} == {"step_3", f"step_{STEPS}"}
    assert remote.newest(f"{address}/checkpoints").step == STEPS
    assert json.loads(transfer.read_text(f"{address}/result.json"))["status"] == "finished"

    for done in two_ranks.run(train_stored, url=server, **settings(folder=third, **case, changes=storage)):
        assert (done["status"], done["step"]) == ("finished", STEPS)
    assert not third.exists()  # there was nothing to do

    begin = [f"run.resume={address}/checkpoints/step_3", "checkpoint.storage=null", "checkpoint.every=1"]
    two_ranks.run(train_stored, url=server, **settings(folder=third, **case, changes=begin))
    assert not (third / "fetched").exists()
    ours, theirs = weights(third, STEPS), weights(whole, STEPS)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items())
