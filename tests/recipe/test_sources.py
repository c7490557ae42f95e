"""A recipe with settings from another project agrees with it, or its header states the difference."""

import itertools
import re
from pathlib import Path

import yaml

from each_case import check_each
from wfm_ds.recipe import file as recipe_file

FOLDER = Path(__file__).parent
RECIPES = FOLDER.parent.parent / "recipes"
SOURCES = yaml.safe_load((FOLDER / "sources.yaml").read_text())
PROJECTS = (
    "Flow-Factory|UniRL|Cosmos-RL|cosmos-framework|VeRL-Omni|Pref-GRPO's|DiffSynth-Studio|NVlabs/Sana|FastVideo|FastGen|"
    r"Cosmos-H-Surgical-Simulator|its repository|the repository of|\(arXiv \d+\.\d+"
)
# These recipes take settings from another recipe; the header of that recipe names the project too.
INDIRECT = {
    *("cosmos3_nano_nft", "cosmos3_nano_actions_nft", "cosmos3_nano_history_nft"),
    *("cp_i2v_nft", "cp_actions_nft", "sana_wm_nft"),
}


def read_header(name):
    lines = itertools.takewhile(lambda line: line.startswith("#"), (RECIPES / f"{name}.yaml").read_text().splitlines())
    return " ".join(" ".join(line.strip("# ") for line in lines).split())


def read_value(recipe, key):
    if key == "reward":
        return [function.name for function in recipe.rl.reward.functions]
    value = recipe
    for part in key.split("."):
        value = getattr(value, part)
    if key == "algorithm.num_levels" and value is None:
        return recipe.algorithm.terms_per_sample(recipe.sampling)
    if key == "algorithm.zero_std":
        return "drop" if recipe.algorithm.drops_zero_std else "keep"
    return value.model_dump() if hasattr(value, "model_dump") else value


@check_each("name", SOURCES)
def test_a_recipe_agrees_with_its_source_or_states_the_difference(name):
    recipe, header, entry = recipe_file.load_recipe(RECIPES / f"{name}.yaml"), read_header(name), SOURCES[name]
    differs = entry.get("differs", {})
    for key, published in entry["values"].items():
        value = read_value(recipe, key)
        value = list(value) if isinstance(value, tuple) else value
        if isinstance(published, dict):
            value = {part: list(v) if isinstance(v, tuple) else v for part, v in value.items() if part in published}
        is_equal = value == published
        assert is_equal != (key in differs), f"{key} is {value}, the source has {published}"
    unstated = [words for words in (*differs.values(), *entry.get("states", ())) if words not in header]
    assert not unstated, f"not in the header: {unstated}"


def test_every_recipe_that_names_a_source_is_in_the_table():
    recipes = [path.stem for path in RECIPES.glob("*.yaml")]
    named = {name for name in recipes if re.search(rf"Settings:.*({PROJECTS})", read_header(name))}
    assert named - INDIRECT <= set(SOURCES)
    commit = r"(arXiv \d+\.\d+.*, and )?[\w-]+/[\w.-]+@[0-9a-f]{7,8} .+"
    assert all(re.fullmatch(commit, entry["source"]) for entry in SOURCES.values())
