"""The JSON schema for editors accepts the shipped recipes and those in the docs, and rejects typical mistakes.

The validator is an optional package (make test-optional). The command is wfm_ds.cli.schema.
"""

import copy
import re
from pathlib import Path

import pytest
import yaml

from each_case import check_each
from wfm_ds.cli.main import main
from wfm_ds.recipe import shipped_recipes
from wfm_ds.recipe.editor_schema import build_schema, format_schema
from wfm_ds.recipe.file import dump_recipe, load_recipe, read_recipe_tree
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.tree import parse_yaml

ROOT = Path(__file__).parent.parent.parent
NAMES = shipped_recipes.list_recipe_names()
MAX_BYTES = 130_000


@pytest.fixture(scope="module")
def validator():
    return pytest.importorskip("jsonschema").Draft7Validator(build_schema())


def problems(validator, text):
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(parse(text))]


def parse(text):
    return parse_yaml(text, "a recipe").values


def test_the_shipped_schema_is_current(capsys, tmp_path):
    text = shipped_recipes.schema_path().read_text()
    assert text == format_schema(), "run: python -m wfm_ds.cli.recipe_docs docs/recipes.md"
    assert len(text) < MAX_BYTES
    assert set(build_schema()["properties"]) == {"defaults", *Recipe.model_fields}
    assert build_schema()["$defs"]["RunRecipe"]["properties"]["seed"]["description"].startswith("Random seed.")
    assert main(["schema", str(tmp_path / "mine.json")]) == 0
    assert (tmp_path / "mine.json").read_text() == text
    capsys.readouterr()
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == text


@check_each("name", NAMES)
def test_each_shipped_recipe_and_its_copy_name_the_schema(name):
    path = shipped_recipes.require_recipe(name)
    first_line = path.read_text().splitlines()[0]
    assert first_line.startswith(shipped_recipes.MODELINE)
    found = path.parent / first_line.removeprefix(shipped_recipes.MODELINE)
    assert found.resolve() == shipped_recipes.schema_path().resolve()
    copied = shipped_recipes.portable_recipe_text(path).splitlines()[0]
    assert copied == f"{shipped_recipes.MODELINE}{shipped_recipes.schema_path().resolve().as_uri()}"


def test_the_schema_accepts_each_recipe_as_a_file_merged_and_resolved(validator):
    validator.check_schema(validator.schema)
    for name in NAMES:
        path = shipped_recipes.require_recipe(name)
        assert problems(validator, path.read_text()) == [], name
        assert list(validator.iter_errors(read_recipe_tree(path).values)) == [], name
        assert problems(validator, dump_recipe(load_recipe(path))) == [], name


def test_the_schema_accepts_each_recipe_in_the_docs(validator):
    counts = {"whole": 0, "fragment": 0}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            if yaml.safe_load(text).keys() <= {"defaults", *Recipe.model_fields}:  # not of the reward service
                values = parse(text)
                is_whole = {"run", "model", "data"} <= values.keys()
                counts["whole" if is_whole else "fragment"] += 1
                values = values if is_whole else {"defaults": "base.yaml", **values}
                assert [error.message for error in validator.iter_errors(values)] == [], f"{page.name}: {text}"
    assert min(counts.values()) > 3, counts


IMAGES = """
run: {output_dir: out, steps: 3}
model: {path: tiny:sd3}
data: {kind: paired, path: p}
sampling: {height: 32, width: 32}
algorithm: {name: sft}
"""
LANGUAGE = """
run: {output_dir: out, steps: 3}
model: {path: tiny:qwen25vl}
data: {kind: llava, path: p}
algorithm: {name: vlm_sft}
"""
MISTAKES = {  # {change of IMAGES: path of the error}
    "run.stepps=3": "run",
    "run.steps=many": "run/steps",
    "run.steps=2.5": "run/steps",
    "run.steps='3'": "run/steps",
    "optimizer={lr: true}": "optimizer/lr",
    "optimizer={lr: -1}": "optimizer/lr",
    "optimizer={betas: [0.9]}": "optimizer/betas",
    "data.kind=pared": "data/kind",
    "algorithm.name=stf": "algorithm/name",
    "algorithm.kl_beta=1": "algorithm",  # a key of other algorithms
    "algorithm={}": "algorithm",
    "sampling=null": "sampling",
    "sampling.window={kind: random, sise: 3}": "sampling/window",
    "validation={held_out_rewards: [3]}": "validation/held_out_rewards/0",
    "reward={functions: [{weight: 1}]}": "reward/functions/0",
    "reward={}": "reward",
    "modle={path: p}": "",
    "defaults=3": "defaults",
}


def change(text, argument):
    values, (key, _, value) = parse(text), argument.partition("=")
    *sections, last = key.split(".")
    holder = values
    for section in sections:
        holder = holder[section]
    holder[last] = parse(value)
    return values


def test_typical_mistakes_are_marked_at_their_place(validator):
    assert problems(validator, IMAGES) == []
    for argument, place in MISTAKES.items():
        errors = list(validator.iter_errors(change(IMAGES, argument)))
        assert errors, argument
        assert {"/".join(map(str, error.absolute_path)) for error in errors} == {place}, argument
    for section in ("run", "model", "data", "sampling", "algorithm"):
        values = {name: value for name, value in parse(IMAGES).items() if name != section}
        assert list(validator.iter_errors(values)), section
        assert not list(validator.iter_errors({"defaults": "base.yaml", **values})), section


def test_files_that_only_an_editor_sees_are_accepted(validator):
    for text in (
        LANGUAGE,
        LANGUAGE.replace("vlm_sft", "package.module:Class, own_key: 3") + "sampling: {height: 1, width: 1}",
        "defaults: base.yaml\nlora: null\nsampling: {steps: 3}\nalgorithm: {kl_beta: 0.1}\nrollout: null",
        IMAGES + "validation: {held_out_rewards: [motion, {name: clipscore}]}",
    ):
        assert problems(validator, text) == [], text
    for text in (
        LANGUAGE + "sampling: {height: 1, width: 1}",
        "defaults: base.yaml\nalgorithm: {kl_bta: 0.1}",
        "defaults: base.yaml\nalgorithm: {kl_beta: much}",
    ):
        assert problems(validator, text) != [], text


def test_a_misspelled_key_and_a_mapping_instead_of_a_value_are_marked_in_every_section(validator):
    num_keys = 0
    for name in ("sd3_mix_grpo", "cp_ddrl_2b", "digits/nft"):
        resolved = parse(dump_recipe(load_recipe(shipped_recipes.require_recipe(name))))
        for section, values in resolved.items():
            for key, value in values.items():
                wrong = copy.deepcopy(resolved)
                wrong[section][f"{key}x"] = wrong[section].pop(key)
                assert not validator.is_valid(wrong), f"{name}: {section}.{key}x"
                num_keys += 1
                if isinstance(value, str | bool | int | float):
                    wrong = copy.deepcopy(resolved)
                    wrong[section][key] = {"odd": 1}
                    assert not validator.is_valid(wrong), f"{name}: {section}.{key}"
    assert num_keys > 300
