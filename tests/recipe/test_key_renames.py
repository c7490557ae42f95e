"""Renamed keys: an error with the new name in a user's recipe, and a conversion for stored recipes."""

import pytest
import yaml

from each_case import check_each
from wfm_ds.cli.main import main
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.file import RENAMED_KEYS
from wfm_ds.runs import layout

RECIPE = """\
run: {output_dir: out, steps: 3}
model: {path: "tiny:sd3"}
data: {kind: prompts, path: prompts}
sampling: {height: 64, width: 64}
algorithm: {name: diffusion_nft}
rollout: {group_size: 4, mode: async}
reward: {functions: [{name: color}]}
"""
OLD = {
    "validation": {"judges": ["ocr", {"name": "digits", "workers": 2}]},
    "rollout": {"lost_after_s": 5},
    "data": {"choose": "spread"},
}
MESSAGES = {
    "validation.judges=[ocr]": "validation.judges has been renamed to validation.held_out_rewards: change the key",
    "rollout.lost_after_s=5": "rollout.lost_after_s has been renamed to rollout.worker_timeout_s: change the key",
    "data.choose=spread": "data.choose: spread has been renamed to reward_std: change the value",
}


@pytest.fixture
def folder(tmp_path):
    """Return a run folder with a resolved recipe that has the old key names."""
    (tmp_path / "new.yaml").write_text(RECIPE)
    values = yaml.safe_load(recipe_file.dump_recipe(recipe_file.load_recipe(tmp_path / "new.yaml")))
    for section, keys in OLD.items():
        values[section] |= keys
    for new in RENAMED_KEYS.values():
        section, key = new.split(".")
        del values[section][key]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


@check_each(("override", "message"), MESSAGES.items())
def test_an_old_name_in_an_override_fails_with_the_new_one(tmp_path, override, message):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError) as caught:
        recipe_file.load_recipe(tmp_path / "mine.yaml", [override])
    assert str(caught.value) == f"override {override}: {message}"


def test_old_names_in_a_file_fail_with_line_and_new_name(folder, capsys):
    assert main(["train", str(folder / "recipe.yaml"), "--dry-run"]) == 2
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert sorted(line.split(": ", 1)[1] for line in lines) == sorted(MESSAGES.values())
    assert all(line.startswith(f"{folder}/recipe.yaml:") for line in lines)


def test_a_stored_recipe_with_old_names_is_converted(folder):
    _, recipe = layout.read_run_recipe(str(folder))
    assert recipe.rollout.worker_timeout_s == 5
    assert recipe.data.choose == "reward_std"
    assert [(r.name, r.workers) for r in recipe.validation.held_out_rewards] == [("ocr", 1), ("digits", 2)]
    text = recipe_file.dump_recipe(recipe)
    assert not any(old.partition(".")[2] in text for old in RENAMED_KEYS)


def test_the_old_default_batch_of_a_stored_recipe_is_unset(folder):
    """Otherwise a run with its own reward service could not be resumed."""
    values = yaml.safe_load((folder / "recipe.yaml").read_text())
    values["reward"] |= {"spawn": False, "endpoint": "pipes.json", "functions": [{"name": "color", "max_batch": 16}]}
    values["validation"]["judges"] = ["ocr", {"name": "digits", "max_batch": 16}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    recipe = recipe_file.load_stored_recipe(folder / "recipe.yaml")
    rewards = [*recipe.reward.functions, *recipe.validation.held_out_rewards]
    assert [reward.max_batch for reward in rewards] == [None] * 3


def test_a_stored_dgpo_recipe_keeps_its_loss(tmp_path):
    (tmp_path / "new.yaml").write_text(RECIPE.replace("diffusion_nft", "dgpo"))
    values = yaml.safe_load(recipe_file.dump_recipe(recipe_file.load_recipe(tmp_path / "new.yaml")))
    assert values["algorithm"].pop("clip_ratio") == 0.01
    del values["algorithm"]["kl_beta"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    algorithm = recipe_file.load_stored_recipe(tmp_path / "recipe.yaml").algorithm
    assert (algorithm.clip_ratio, algorithm.kl_beta) == (None, 0)


def test_an_override_of_a_stored_recipe_uses_new_names(folder):
    with pytest.raises(RecipeError, match=r"override data\.choose=spread: .* renamed to reward_std"):
        recipe_file.load_stored_recipe(folder / "recipe.yaml", ["data.choose=spread"])
    stored = recipe_file.load_stored_recipe(folder / "recipe.yaml", ["validation.held_out_rewards=[]"])
    assert stored.validation.held_out_rewards == []
