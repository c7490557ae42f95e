import re
import shlex

import pytest

from wfm_ds.cli import recipe_docs
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.algorithms import ConditioningFramesSettings, ForwardProcessSettings
from wfm_ds.recipe.editor_schema import format_schema
from wfm_ds.recipe.schema import Recipe
from wfm_ds.recipe.schema_description import iterate_sections


def test_the_page_is_what_the_schema_generates(root):
    page = (root / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == recipe_docs.render_page(), "run: python -m wfm_ds.cli.recipe_docs docs/recipes.md"


def page_sections():
    """Return {heading: {key: entry}} of the generated page."""
    sections = re.split(r"^## ", recipe_docs.render_page(), flags=re.MULTILINE)[1:]
    return {
        text.split("\n")[0]: {entry[1]: entry[0] for entry in re.finditer(r"^\* `(\w+)` \(.+?; .+?\): .+$", text, re.M)}
        for text in sections
    }


def test_the_page_is_plain_text_with_one_entry_per_line():
    page = recipe_docs.render_page()
    assert page.isascii()
    entries = [line for line in page.splitlines() if line.startswith("* ")]
    assert len(entries) == sum(len(section) for section in page_sections().values())
    assert "* `lr` (float > 0; `0.0001`): Peak learning rate." in entries
    assert (
        "* `betas` (list of 2: float in [0, 1); `[0.9, 0.999]`): Decay rates of the first and second moment." in entries
    )
    assert not [line for line in entries if re.search(r" (a|an|each|one of) |None", line.split("): ")[0])]


def test_every_key_of_every_section_is_on_the_page_and_shared_keys_only_once():
    sections = page_sections()
    shared = {base: sections.pop(recipe_docs.base_heading(base)) for base in recipe_docs.SHARED_SETTINGS}
    printed = list(sections.values())
    classes = list(iterate_sections())
    assert len(printed) == len(classes)
    for entries, (_, title, section) in zip(printed, classes, strict=True):
        inherited = {key for base in shared if issubclass(section, base) for key in shared[base]}
        assert inherited | set(entries) | recipe_docs.heading_keys(section) == set(section.model_fields), title
    assert ["combine" in entries for entries in printed].count(
        True
    ) == 2  # ddrl has a different default; algorithm.reward of dmd2
    assert "num_levels" in shared[ForwardProcessSettings]
    assert "num_levels" not in shared[ConditioningFramesSettings]


def test_an_algorithm_repeats_a_shared_key_only_if_it_differs():
    entries = page_sections()["`algorithm` with `name: ram`"]
    assert entries["advantage_std"].startswith("* `advantage_std` (group, global, none; `group`): ")
    assert "adv_mode" not in entries
    dgpo = page_sections()["`algorithm` with `name: dgpo`"]
    assert dgpo["updates_per_rollout"].endswith("Always 1, so that every update contains whole groups.")


def test_links_to_shared_keys_and_pages_resolve():
    page = recipe_docs.render_page()  # tests/test_structure.py checks that the pages exist
    anchors = {recipe_docs.heading_anchor(line[3:]) for line in page.splitlines() if line.startswith("## ")}
    assert "algorithm-keys-of-all-rl-algorithms" in anchors
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= anchors
    assert "](models.md)" in page


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


def test_the_command_writes_the_page_and_the_schema(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_docs, "schema_path", lambda: tmp_path / "schema.json")
    assert recipe_docs.main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == recipe_docs.render_page()
    assert (tmp_path / "schema.json").read_text() == format_schema()
