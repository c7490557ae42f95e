"""Start of a run, depending on its recipe and its output folder, and rejected folders.

tests/multi_rank/test_resume.py tests resuming itself.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from each_case import check_each
from wfm_ds.checkpoint import store
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.run_sizes import derive_run_sizes
from wfm_ds.recipe.schema import list_unread_async_keys, list_unread_keys
from wfm_ds.runs import layout
from wfm_ds.runs import output_folder as output
from wfm_ds.runs.mirror import Mirror
from wfm_ds.runs.output_checks import require_usable_folder
from wfm_ds.runs.output_folder import RunStart, find_run_start


@pytest.fixture
def recipe(root, tmp_path):
    def load(*overrides, folder="out"):
        path = root / "tests" / "recipes" / "sd3_nft.yaml"
        return recipe_file.load_recipe(path, [f"run.output_dir={tmp_path / folder}", "run.steps=8", *overrides])

    return load


@pytest.fixture
def run(recipe, tmp_path):
    """`run(4, 6)`: write the folder of a run that was killed after checkpoints 4 and 6. `finished`: its result."""

    def leave(*steps, folder="out", overrides=(), finished=None):
        out = tmp_path / folder
        out.mkdir()
        output.claim_folder(out)
        text = recipe_file.dump_recipe(recipe(*overrides, folder=folder))
        (out / "recipe.yaml").write_text(text)
        (out / "metrics.jsonl").write_text('{"step": 1}\n' * 9)
        for step in steps:
            path = out / "checkpoints" / f"step_{step}"
            path.mkdir(parents=True)
            (path / "recipe.yaml").write_text(text)
            files = {"recipe.yaml": len(text)}
            facts = {"metrics_bytes": 12 * step, "samples_per_step": derive_run_sizes(recipe(), 2).samples_per_step}
            marker = {"step": step, "world_size": 2, "facts": facts, "files": files}
            (path / store.COMPLETE).write_text(json.dumps(marker))
        if finished is not None:
            (out / "result.json").write_text(json.dumps({"status": "finished", "step": finished}))
        return out

    return leave


def refusal(recipe, world_size=2):
    with pytest.raises(RecipeError) as caught:
        find_run_start(recipe, world_size)
    return str(caught.value)


def test_empty_or_new_folder_is_a_new_run(recipe, tmp_path):
    assert find_run_start(recipe(), 2) == RunStart()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert find_run_start(recipe("run.resume=never"), 2) == RunStart()


@check_each("name", ["samples", "logs", "checkpoints", "safetensors", "tensorboard", "reward", "recipe.yaml"])
def test_unrecorded_files_with_names_of_a_run_are_refused_and_never_deleted(recipe, tmp_path, name):
    mine = tmp_path / name
    mine.mkdir()
    found = recipe(f"run.output_dir={tmp_path}")
    for resume in ("auto", "never") if name not in ("reward", "recipe.yaml") else ():
        message = refusal(recipe(f"run.output_dir={tmp_path}", f"run.resume={resume}"))
        assert message.startswith(f"run.output_dir {tmp_path} contains {name}, which belong to no run")
    with pytest.raises(RecipeError, match=rf"contains {name}, which \.wfm_run\.json does not list"):
        find_run_start(found, 2, overwrite=True)
    output.clear_run(tmp_path)
    assert mine.exists()


def test_files_of_a_failed_first_start_do_not_block_the_next(recipe, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    output.claim_folder(out)
    for name in ("reward", "logs"):
        (out / name).mkdir()
    output.clear_run(out, keep=["reward"])
    assert sorted(entry.name for entry in out.iterdir()) == [".wfm_run.json", "reward"]
    assert layout.read_folder_record(out) == {"reward"}
    assert find_run_start(recipe(), 2) == RunStart()
    (out / "samples").mkdir()  # created by another program in the meantime
    assert "contains samples, which belong to no run" in refusal(recipe())


@check_each("name", [".git", "pyproject.toml", "setup.py"])
def test_the_folder_of_a_project_is_refused(recipe, tmp_path, name):
    (tmp_path / "reward").mkdir()
    (tmp_path / name).touch()
    for overwrite in (False, True):
        with pytest.raises(RecipeError, match=rf"is a project folder \(it contains {name}\)"):
            find_run_start(recipe(f"run.output_dir={tmp_path}"), 2, overwrite=overwrite)


def test_an_impossible_path_is_a_one_line_error(recipe):
    for key in ("run.output_dir", "data.path", "data.cache_dir"):
        for path, message in (
            ("''", "is empty"),  # it is not the working directory
            ("a" * 100_000, "a path has at most 3500 bytes, this one has 100000"),
            ("a/" * 50_000, "a path has at most 3500 bytes, this one has (99999|100000)"),
        ):
            with pytest.raises(RecipeError, match=message):
                recipe(f"{key}={path}")
    # The limit of this file system is lower than the limit of the recipe.
    with pytest.raises(RecipeError, match=r"\(1,002 characters\): File name too long: set another folder") as caught:
        require_usable_folder(Path("a" * 1000) / "b")
    assert len(str(caught.value)) < 400


def test_a_dangling_link_is_a_one_line_error(recipe, tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    for name in ("dangling", "dangling/out"):
        assert f"{tmp_path}/dangling is a link to {tmp_path}/nowhere, which does not exist" in refusal(
            recipe(folder=name)
        )
    for name in ("self", "self/out"):
        assert "Too many levels of symbolic links: set another folder" in refusal(recipe(folder=name))
    (tmp_path / "nowhere").mkdir()
    assert find_run_start(recipe(folder="dangling"), 2) == RunStart()


def test_output_below_a_file_is_refused(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a writable folder (Not a directory)" in refusal(recipe(folder="file/out"))
    assert "/proc is not a writable folder (" in refusal(recipe(folder="/proc/out"))


def test_run_is_continued_from_its_newest_checkpoint(recipe, run):
    out = run(4, 6)
    assert find_run_start(recipe(), 2) == RunStart(
        checkpoint=str(out / "checkpoints" / "step_6"), step=6, metrics_bytes=72
    )
    (out / "checkpoints" / "step_6" / "recipe.yaml").write_text("torn")
    assert find_run_start(recipe(), 2) == RunStart(
        checkpoint=str(out / "checkpoints" / "step_4"), step=4, metrics_bytes=48
    )


def test_never_refuses_a_folder_with_a_run(recipe, run):
    run(4)
    message = refusal(recipe("run.resume=never"))
    assert "already contains a run (recipe.yaml, metrics.jsonl)" in message
    assert message.endswith("or pass --overwrite to replace that run")


def test_run_without_a_checkpoint_begins_again_with_the_same_recipe(recipe, run):
    out = run()
    assert find_run_start(recipe(), 2) == RunStart(is_restart=True)
    assert "optimizer.lr: 0.0003 there, 1.0 here" in refusal(recipe("optimizer.lr=1"))
    (out / "result.json").write_text('{"status": "failed", "step": 1}')
    (out / "tensorboard").mkdir()
    for number in (1, 2):
        output.open_output_folder(recipe(), find_run_start(recipe(), 2))
        assert not (out / "result.json").exists()
        assert (out / "metrics.jsonl").read_text() == ""
        assert (out / "earlier" / "1" / "metrics.jsonl").read_text() == '{"step": 1}\n' * 9
        assert (out / "earlier" / str(number) / "metrics.jsonl").read_text().endswith(f'{{"step": {number}}}\n')
        (out / "metrics.jsonl").write_text('{"step": 2}\n')
    assert {path.name for path in (out / "earlier" / "1").iterdir()} == {"metrics.jsonl", "result.json", "tensorboard"}
    assert layout.list_unrecorded_files(out) == ()


def test_damaged_checkpoints_are_an_error_instead_of_a_restart(recipe, run):
    out = run(4)
    (out / "checkpoints" / "step_4" / "recipe.yaml").write_text("torn")
    message = refusal(recipe())
    assert "with only damaged checkpoints (step_4: recipe.yaml has 4 bytes instead of" in message
    assert find_run_start(recipe(), 2, overwrite=True) == RunStart()


def test_a_run_without_own_checkpoint_starts_again_from_run_resume(recipe, run):
    path = run(4, folder="other") / "checkpoints" / "step_4"
    resume = f"run.resume={path}"
    run(overrides=[resume])
    assert find_run_start(recipe(resume), 2) == RunStart(checkpoint=str(path), step=4, is_restart=True)


def test_checkpoints_without_a_run_are_refused(recipe, run):
    out = run(4)
    for name in ("recipe.yaml", "metrics.jsonl"):
        (out / name).unlink()
    assert "contains checkpoints, which belong to no run" in refusal(recipe())


def test_any_ranks_may_continue_but_with_the_same_global_batch_only(recipe, run):
    marker = run(4) / "checkpoints" / "step_4" / store.COMPLETE
    assert find_run_start(recipe(), 1).step == 4
    complete = json.loads(marker.read_text())
    complete["facts"]["samples_per_step"] += 8
    marker.write_text(json.dumps(complete))
    message = refusal(recipe(), world_size=1)
    assert "step_4 was written by 2 ranks with 16 samples per step; 1 ranks with this recipe have 8" in message


@pytest.mark.parametrize(("num_experts", "refused"), [(2, True), (1, False)])
def test_micro_batches_decide_which_expert_trains_so_that_their_number_must_stay(
    recipe, run, root, tmp_path, num_experts, refused
):
    marker = run(4) / "checkpoints" / "step_4" / store.COMPLETE

    def sft(micro, accumulation):
        cut = (f"engine.micro_batch_size={micro}", f"engine.gradient_accumulation={accumulation}")
        path = root / "tests" / "recipes" / "sd3_sft.yaml"
        return recipe_file.load_recipe(path, [f"run.output_dir={tmp_path / 'out'}", *cut])

    text = recipe_file.dump_recipe(sft(2, 4))
    (marker.parent / "recipe.yaml").write_text(text)
    facts = {"metrics_bytes": 0, "samples_per_step": 16, "accumulation": 4, "num_experts": num_experts}
    complete = {"step": 4, "world_size": 2, "facts": facts, "files": {"recipe.yaml": len(text)}}
    marker.write_text(json.dumps(complete))
    assert find_run_start(sft(4, 4), 1).step == 4
    if refused:
        assert "set engine.gradient_accumulation to 4, and engine.micro_batch_size or" in refusal(sft(4, 2))
    else:
        assert find_run_start(sft(4, 2), 2).step == 4


def test_only_keys_without_effect_on_training_may_change(recipe, run):
    out = run(4)
    for change in (
        *("run.steps=9", "logging.console=false", "validation.every=3", "checkpoint.every=1", "reward.timeout_s=7"),
        *("reward.functions.0.workers=2", "reward.functions.0.device='cuda:1'", "engine.deepspeed=zero3"),
        *("engine.micro_batch_size=1", "engine.sequence_parallel=2", "engine.compile=true", "model.attention=native"),
        "engine.fused_norms=true",
    ):
        assert find_run_start(recipe(change), 2).step == 4, change
    for change, named in (
        ("optimizer.lr=0.5", "optimizer.lr: 0.0003 there, 0.5 here"),
        ("algorithm.old_decay={slope: 0.5}", "algorithm.old_decay: standard there, nothing here"),
        ("lora=null", "lora.rank: 4 there, nothing here"),
        ("reward.functions=[{name: color}]", "reward.functions: "),
        ("run.seed=1", "run.seed: 0 there, 1 here"),
    ):
        message = refusal(recipe(change))
        assert message.startswith(f"{out}/checkpoints/step_4/recipe.yaml is a different recipe (")
        assert named in message


def test_numbers_that_are_not_listed_as_changeable_must_stay_equal(recipe):
    here = recipe("data.choose=reward_std")
    values = here.model_dump(mode="json")
    for section, keys in values.items():
        for key, value in (keys or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
                continue
            changed = values | {section: keys | {key: value + (0.01 if isinstance(value, float) else 4)}}
            other = type(here).model_construct(**vars(here) | {section: section_of(here, section, changed)})
            if list_unread_keys(other) or list_unread_async_keys(other) or key == "clips":
                continue  # recipes cannot contain such keys; clips need conditioning frames
            found = output.list_recipe_changes(here, type(here).model_validate(changed))
            free = f"{section}.{key}".startswith(output.MAY_CHANGE)
            assert [line.split(":")[0] for line in found] == ([] if free else [f"{section}.{key}"])


def section_of(recipe, name, values):
    return type(getattr(recipe, name)).model_validate(values[name])


ROBOTS = ["data.kind=lerobot", "data.path=a/b"]


@check_each(
    ("there", "here", "differing"),
    [
        ([], ["validation.holdout=0.5"], ["validation.holdout: 0.02 there, 0.5 here"]),
        (
            [*ROBOTS, "validation.episodes='-2:'"],
            [*ROBOTS, "validation.episodes='-3:'"],
            ["validation.episodes: -2: there, -3: here"],
        ),
        # Values are shown as in YAML.
        ([], ["model.max_sequence_length=64"], ["model.max_sequence_length: null there, 64 here"]),
        ([], ["data.shuffle=false"], ["data.shuffle: true there, false here"]),
        # With buckets, the micro-batch decides the order of the samples.
        (["engine.micro_batch_size=4"], ["engine.micro_batch_size=8"], []),
        (
            ["engine.micro_batch_size=4", "data.buckets=[[16, 16], [16, 32]]"],
            ["engine.micro_batch_size=8", "data.buckets=[[16, 16], [16, 32]]"],
            ["engine.micro_batch_size: 4 there, 8 here"],
        ),
    ],
)
def test_changes_of_an_sft_recipe_that_make_another_run(root, there, here, differing):
    path = root / "tests" / "recipes" / "sd3_sft.yaml"
    recipes = [recipe_file.load_recipe(path, words) for words in (there, here)]
    assert output.list_recipe_changes(*recipes) == differing


def test_finished_run_has_nothing_to_do_unless_it_is_made_longer(recipe, run):
    run(6, 8, finished=8)
    assert find_run_start(recipe(), 2) == RunStart(step=8, is_finished=True)
    assert find_run_start(recipe("run.steps=3"), 7) == RunStart(step=8, is_finished=True)
    assert find_run_start(recipe("run.steps=9"), 2).step == 8


def test_finished_run_without_a_checkpoint_cannot_be_made_longer(recipe, run):
    run(finished=8)
    assert find_run_start(recipe(), 2).is_finished
    assert "finished at step 8 without a checkpoint" in refusal(recipe("run.steps=9"))
    assert "optimizer.lr" in refusal(recipe("optimizer.lr=1"))


def test_unrelated_files_are_refused_or_ignored(recipe, run):
    out, deep = run(4), "[" * 100_000
    for text in ("[]", deep, '{"status": "finished", "step": Infinity}', '{"status": "finished", "step": {}}'):
        (out / "result.json").write_text(text)
        assert "result.json was not written by a run" in refusal(recipe())
    for text in ("[]", deep, '{"wrote": [[]]}', '{"wrote": 1}'):
        (out / layout.RECORD_FILE).write_text(text)
        assert layout.read_folder_record(out) == frozenset()
        (out / ".storage.json").write_text(text)
        assert Mirror(out, "s3://bucket/run", keep=1)._sent == {}


def test_files_that_a_killed_run_was_writing_are_removed_at_the_next_start(recipe, run):
    out = run(4)
    parts = [out / f".{'0a' * 8}.part", out / "checkpoints" / "step_4" / f".{'f0' * 8}.part"]
    others = [out / ".mine.part", out / "mine" / f".{'0a' * 8}.part"]
    (out / "mine").mkdir()
    for path in (*parts, *others):
        path.touch()
    output.open_output_folder(recipe(), find_run_start(recipe(), 2))
    assert ([path.exists() for path in parts], [path.exists() for path in others]) == ([False] * 2, [True] * 2)


def test_checkpoint_of_another_folder_begins_a_new_run_there(recipe, run):
    path = run(4, folder="other") / "checkpoints" / "step_4"
    assert find_run_start(recipe(f"run.resume={path}"), 2) == RunStart(checkpoint=str(path), step=4)
    assert "optimizer.lr" in refusal(recipe(f"run.resume={path}", "optimizer.lr=1"))
    run(6)  # the same command continues the run that it started
    assert find_run_start(recipe(f"run.resume={path}"), 2).step == 6


def test_a_path_without_a_checkpoint_is_refused(recipe):
    message = refusal(recipe("run.resume=atuo"))
    assert message.startswith("run.resume: atuo is not a complete checkpoint: set auto, never")


def test_path_into_the_same_folder_is_refused_before_anything_is_discarded(recipe, run):
    out = run(4, 6)
    again = recipe(f"run.resume={out / 'checkpoints' / 'step_4'}")
    assert "is a checkpoint of run.output_dir itself" in refusal(again)
    with pytest.raises(RecipeError, match="itself"):
        find_run_start(again, 2, overwrite=True)
    assert sorted(f.name for f in (out / "checkpoints").iterdir()) == ["step_4", "step_6"]


def test_opening_cuts_back_to_the_checkpoint_and_discarding_removes_the_run_alone(recipe, run, tmp_path):
    out = run(4, finished=8)
    (out / "notes.txt").write_text("mine")
    output.open_output_folder(recipe("run.steps=9"), find_run_start(recipe("run.steps=9"), 2))
    assert (out / "metrics.jsonl").read_text() == '{"step": 1}\n' * 4
    assert recipe_file.load_recipe(out / "recipe.yaml").run.steps == 9
    assert not (out / "result.json").exists()
    output.clear_run(out)
    assert sorted(f.name for f in out.iterdir()) == ["notes.txt"]  # the folder record is removed too
    output.clear_run(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_overwriting_starts_anew_and_never_deletes_what_the_run_reads(recipe, run, tmp_path, monkeypatch):
    out = run(4, 6)
    assert find_run_start(recipe(), 2, overwrite=True) == RunStart()
    monkeypatch.setenv("HOME", str(tmp_path))
    (out / "zero.json").write_text("{}")
    for override in (
        *(f"model.path={out}/safetensors/step_4", f"data.path={out}/data", f"engine.deepspeed={out}/zero.json"),
        *("model.path=~/out/model", "engine.deepspeed=~/out/zero.json", "validation.prompts=~/out/samples"),
    ):
        with pytest.raises(RecipeError, match=r"is inside run\.output_dir, which --overwrite clears"):
            find_run_start(recipe(override), 2, overwrite=True)
    assert sorted(f.name for f in (out / "checkpoints").iterdir()) == ["step_4", "step_6"]


def test_a_tiny_model_does_not_count_as_a_path_in_the_folder(recipe, root, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    prompts = f"data.path={root / 'recipes' / 'prompts' / 'colors'}"
    tiny = recipe("model.path=tiny:sd3", prompts)
    monkeypatch.chdir(tmp_path / "out")
    assert find_run_start(tiny, 2, overwrite=True) == RunStart()


def test_folder_belongs_to_one_process_until_it_ends(recipe, run):
    out = run(4)
    code = (
        "from pathlib import Path; from wfm_ds.runs.output_folder import lock_folder\nwith "
        f"lock_folder(Path({str(out)!r})): print(1)"
    )
    with output.lock_folder(out):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
        assert "another run is active there" in other.stderr
        with pytest.raises(RecipeError, match="another run is active"), output.lock_folder(out):
            pass
    with output.lock_folder(out):
        pass
