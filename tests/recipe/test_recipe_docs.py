import json
import re
import shlex

import pytest

from wfm_ds import recipe_docs
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.schema import Recipe


def test_the_page_is_what_the_schema_generates(root):
    page = (root / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == recipe_docs.render_page(), "run: python -m wfm_ds.recipe_docs docs/recipes.md"


def test_the_page_is_plain_text_in_well_formed_tables():
    page = recipe_docs.render_page()
    assert page.isascii()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)


def test_pages_named_in_descriptions_are_linked(root):
    targets = re.findall(r"\]\(([^)#]+)\)", recipe_docs.render_page())
    assert "models.md" in targets
    assert [target for target in targets if not (root / "docs" / target).is_file()] == []


@pytest.fixture
def guide(root):
    return (root / "docs" / "recipe_guide.md").read_text(encoding="utf-8")


@pytest.fixture
def example(guide, tmp_path):
    path = tmp_path / "sd3_nft.yaml"
    path.write_text(re.search(r"```yaml\n(run:.*?)```", guide, re.DOTALL)[1])
    return path


def test_the_example_is_a_recipe_and_its_data_exist(root, example):
    recipe = recipe_file.load_recipe(example)
    assert recipe.algorithm.name == "diffusion_nft"
    assert (root / recipe.data.path / "train.txt").is_file()


def test_the_overrides_and_the_variant_on_the_page_work(guide, tmp_path, example):
    command = re.search(r"wfm train mine.yaml (run.steps=.*?)\n```", guide, re.DOTALL)[1]
    words = shlex.split(command.replace("\\\n", " "))
    assert len(words) == 6
    recipe = recipe_file.load_recipe(example, words)
    assert (recipe.run.steps, recipe.lora, recipe.reward.functions[0].weight) == (200, None, 2)
    variant = tmp_path / "variant.yaml"
    variant.write_text(re.search(r"```yaml\n(defaults: .*?)```", guide, re.DOTALL)[1])
    assert recipe_file.load_recipe(variant).algorithm.kl_beta == 0.001


def test_the_sections_on_the_page_are_those_of_the_schema(guide):
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(Recipe.model_fields)


def test_the_error_messages_on_the_page_are_real(guide, example):
    with pytest.raises(RecipeError) as caught:
        recipe_file.load_recipe(example, ["optimizer.lr=-1"])
    assert f"\n{caught.value}\n" in guide
    with pytest.raises(RecipeError) as caught:
        recipe_file.load_recipe(example, ["algorithm.timestep_fracton=1"])
    assert str(caught.value).split(": ", 1)[1] in guide


def test_the_command_writes_the_page_and_prints_the_json_schema(tmp_path, capsys):
    assert recipe_docs.main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == recipe_docs.render_page()
    assert recipe_docs.main(["--json-schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(Recipe.model_fields)
