"""How a run starts if its S3 storage is ahead of its local folder, and commands that take s3:// addresses."""

import json

import pytest

import s3
from commands import wfm_command
from each_case import check_each
from wfm_ds.checkpoint import remote_store, store
from wfm_ds.cli.doctor import recipe as doctor_recipe
from wfm_ds.errors import RecipeError, StorageError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.runs import layout, output_checks
from wfm_ds.runs.mirror import Mirror
from wfm_ds.runs.output_folder import RunStart, find_run_start
from wfm_ds.runs.storage_copies import StorageCopies, send_result
from wfm_ds.storage import transfer

WORLD = 2


@pytest.fixture(autouse=True)
def credentials(s3_server, monkeypatch):
    for name in s3.VARIABLES:
        monkeypatch.setenv(name, "")  # monkeypatch restores it after the test
    s3.use(s3_server[0])


@pytest.fixture
def address(request):
    return f"s3://{s3.BUCKET}/{request.node.name}"


@pytest.fixture
def recipe(root, tmp_path, address):
    def load(*overrides, folder="out"):
        path = root / "tests" / "recipes" / "sd3_nft.yaml"
        places = [f"run.output_dir={tmp_path / folder}", f"checkpoint.storage={address}"]
        return recipe_file.load_recipe(path, [*places, "run.steps=8", *overrides])

    return load


@pytest.fixture
def leave(recipe, address):
    """`leave(4, 6)`: write the files of a run with these checkpoints to the storage; `leave(4, folder=...)`: to a
    folder."""

    def run(*steps, folder=None, finished=None):
        text = recipe_file.dump_recipe(recipe())
        record = layout.format_record((*layout.RUN_FILES, *layout.RUN_FOLDERS))
        files = {layout.RECORD_FILE: record, "recipe.yaml": text, "metrics.jsonl": '{"step": 1}\n' * 9}
        facts = {"metrics_bytes": 12, "samples_per_step": derive_run_sizes(recipe(), WORLD).samples_per_step}
        for step in steps:
            marker = {"step": step, "world_size": WORLD, "facts": facts, "files": {"recipe.yaml": len(text)}}
            files |= {f"checkpoints/step_{step}/{store.COMPLETE}": json.dumps(marker)}
            files |= {f"checkpoints/step_{step}/recipe.yaml": text}
        if finished is not None:
            files["result.json"] = json.dumps({"status": "finished", "step": finished})
        for name, content in files.items():
            if folder is None:
                transfer.put_object(content.encode(), f"{address}/{name}")
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(content)

    return run


def test_an_empty_storage_is_a_new_run(recipe):
    assert find_run_start(recipe(), WORLD) == RunStart()


def test_the_newest_checkpoint_wins_wherever_it_is(recipe, leave, address, tmp_path):
    leave(4, 6)
    there = RunStart(checkpoint=f"{address}/checkpoints/step_6", step=6, metrics_bytes=12)
    assert find_run_start(recipe(), WORLD) == there
    leave(2, folder=tmp_path / "out")
    assert find_run_start(recipe(), WORLD) == there
    leave(6, folder=tmp_path / "out")
    assert find_run_start(recipe(), WORLD).checkpoint == str(tmp_path / "out" / "checkpoints" / "step_6")
    leave(7, folder=tmp_path / "out")
    assert find_run_start(recipe(), WORLD).step == 7


def test_a_checkpoint_without_its_marker_is_not_used(recipe, leave, address):
    leave(4, 6)
    transfer.remove_objects([f"{address}/checkpoints/step_6/{store.COMPLETE}"])
    assert find_run_start(recipe(), WORLD).step == 4


def test_a_run_in_the_storage_is_refused_like_one_in_the_folder(recipe, leave, address):
    leave(4)
    for change, said in (
        ("run.resume=never", f"checkpoint.storage {address} already contains a run (recipe.yaml, metrics.jsonl)"),
        ("optimizer.lr=1", f"{address}/checkpoints/step_4/recipe.yaml is a different recipe (optimizer.lr"),
        (f"run.resume={address}/checkpoints/step_4", "is a checkpoint of checkpoint.storage itself"),
    ):
        with pytest.raises(RecipeError) as caught:
            find_run_start(recipe(change), WORLD)
        assert said in str(caught.value)
    transfer.remove_objects([f"{address}/checkpoints/step_4/{store.COMPLETE}"])
    assert find_run_start(recipe(), WORLD) == RunStart(is_restart=True)
    assert find_run_start(recipe(), WORLD, overwrite=True) == RunStart()


def test_incomplete_stored_checkpoints_are_an_error_instead_of_a_restart(recipe, leave, address):
    leave(4)
    transfer.remove_objects([f"{address}/checkpoints/step_4/recipe.yaml"])
    with pytest.raises(
        RecipeError, match=r"only damaged checkpoints \(step_4: files are missing\).* set checkpoint\.storage"
    ):
        find_run_start(recipe(), WORLD)


def test_overwriting_keeps_a_storage_without_a_recorded_run(recipe, leave, address):
    transfer.put_object(b"source", f"{address}/reward/code.py")
    with pytest.raises(RecipeError, match=rf"{address} contains reward, which \.wfm_run\.json does not list"):
        find_run_start(recipe(), WORLD, overwrite=True)


def test_a_run_that_has_finished_elsewhere_has_nothing_to_do(recipe, leave):
    leave(8, finished=8)
    assert find_run_start(recipe(), WORLD) == RunStart(step=8, is_finished=True)
    assert find_run_start(recipe("run.steps=9"), WORLD).step == 8


def test_a_storage_with_unrecorded_files_is_refused(recipe, address):
    transfer.put_object(b"somebody's", f"{address}/samples/mine.png")
    with pytest.raises(RecipeError, match=rf"checkpoint.storage {address} contains samples, which belong to no run"):
        find_run_start(recipe(), WORLD)


def test_inputs_in_the_storage_are_not_overwritten(root, recipe, address):
    with pytest.raises(RecipeError, match=r"data\.path .* is inside checkpoint\.storage, which --overwrite clears"):
        output_checks.require_separate_inputs(
            recipe_file.load_recipe(
                root / "tests" / "recipes" / "sd3_sft.yaml",
                ["data.kind=webdataset", f"data.path={address}/a.tar", f"checkpoint.storage={address}"],
            )
        )


def test_a_run_begins_from_a_checkpoint_at_an_address(recipe, leave, address, tmp_path):
    leave(4)
    there = f"{address}/checkpoints/step_4"
    elsewhere = (f"run.resume={there}", f"checkpoint.storage={address}-2")
    assert find_run_start(recipe(*elsewhere), WORLD) == RunStart(checkpoint=there, step=4)
    with pytest.raises(RecipeError, match=r"run\.resume: s3://.*/step_5 is not a complete checkpoint"):
        find_run_start(recipe(f"run.resume={address}/checkpoints/step_5", f"checkpoint.storage={address}-2"), WORLD)


@check_each("value", ["/mnt/backup", "gs://bucket/run", "s3://", "s3:///"])
def test_invalid_s3_addresses_are_refused(recipe, value):
    with pytest.raises(RecipeError, match=r"checkpoint\.storage.*s3://BUCKET/FOLDER"):
        recipe(f"checkpoint.storage={value}")


def test_the_output_folder_is_on_this_machine(recipe, address):
    with pytest.raises(RecipeError, match=r"run\.output_dir.*checkpoint\.storage takes an s3:// address"):
        recipe(f"run.output_dir={address}")
    assert recipe(f"checkpoint.storage={address}//").checkpoint.storage == address


def test_the_doctor_writes_to_the_storage_and_cleans_up(recipe, address):
    assert doctor_recipe.storage_summary(recipe()) == f"{address} is writable and readable"
    assert transfer.list_objects(address) == {}
    with pytest.raises(StorageError, match="the bucket does not exist"):
        doctor_recipe.storage_summary(recipe("checkpoint.storage=s3://nobodys/run"))


def test_a_stored_checkpoint_is_downloaded_while_it_is_read(leave, address, tmp_path, capsys):
    leave(4)
    with remote_store.open_locally(f"{address}/checkpoints/step_4/", tmp_path) as folder:
        assert folder.name == "step_4"
        assert store.read_checkpoint(folder).step == 4
    transfer.remove_objects([f"{address}/checkpoints/step_4/{store.COMPLETE}"])
    with remote_store.open_locally(address, tmp_path / "out" / "there") as folder:
        assert (folder / "metrics.jsonl").read_text().count("\n") == 9
    assert list(tmp_path.iterdir()) == []
    with remote_store.open_locally(str(tmp_path), tmp_path) as folder:
        assert folder == tmp_path
    assert wfm_command("convert")([f"{address}/nothing", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {address}/nothing: not found\n"


def test_missing_objects_are_one_line_errors(tmp_path):
    names = [f"samples/step_{n}/0000.png" for n in range(5)]
    copies = StorageCopies(address="s3://b/run", missing=names, reason="it is gone")
    assert copies.missing_message(tmp_path) == (
        "s3://b/run is incomplete (it is gone): samples/step_0/0000.png, samples/step_1/0000.png, "
        f"samples/step_2/0000.png and 2 more exist only in {tmp_path}; run the same command again to copy them"
    )


def test_a_result_that_cannot_be_uploaded_is_reported_as_missing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise StorageError("the quota is used up")

    (tmp_path / "result.json").write_text("{}")
    monkeypatch.setattr(transfer, "upload_file", refuse)
    copies = StorageCopies(address="s3://bucket/run", missing=[], reason="")
    sent = send_result(Mirror(tmp_path, copies.address, keep=2), copies)
    assert (sent.missing, sent.reason) == (["result.json"], "the quota is used up")
    assert json.loads((tmp_path / "result.json").read_text())["storage"]["missing"] == sent.missing
