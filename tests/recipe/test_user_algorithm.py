"""A user-defined algorithm in a recipe: its keys are validated like built-in ones, with one-line errors."""

import sys

import pytest

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file

RECIPE = """\
run: {output_dir: out, steps: 3}
model: {path: "tiny:sd3"}
data: {kind: prompts, path: prompts}
sampling: {height: 64, width: 64}
algorithm:
  name: MODULE:Mine
rollout: {group_size: 4}
reward: {functions: [{name: color}]}
"""
SETTINGS = """\
from wfm_ds.recipe.algorithms import RlSettings

class Keys(RlSettings):
    temperature: float = 1.0
    \"\"\"How sharp.\"\"\"

class Mine:
    Settings = Keys

class Bare:
    pass
"""
FORWARD_PROCESS = SETTINGS.replace("class Mine:", "class Mine(ForwardProcess):\n    loss = None").replace(
    "import RlSettings", "import RlSettings\nfrom wfm_ds.algorithms.forward_process import ForwardProcess"
)


@pytest.fixture
def load(tmp_path, monkeypatch, request):
    """Return `load(source, *lines, name=...)`: it writes a module and loads a recipe with `lines` in its algorithm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"mine_{abs(hash(request.node.name))}"

    def load_recipe(source, *lines, name="Mine"):
        (tmp_path / f"{module}.py").write_text(source)
        text = RECIPE.replace("MODULE:Mine", "\n  ".join([f"{module}:{name}", *lines]))
        (tmp_path / "mine.yaml").write_text(text)
        return recipe_file.load_recipe(tmp_path / "mine.yaml")

    yield load_recipe
    sys.modules.pop(module, None)


def test_its_settings_are_read_and_written_like_ours(load, tmp_path):
    recipe = load(SETTINGS, "temperature: 0.5", "best_of_n: 2")
    assert type(recipe.algorithm).__name__ == "Keys"
    assert (recipe.algorithm.temperature, recipe.rl.algorithm.best_of_n) == (0.5, 2)
    (tmp_path / "again.yaml").write_text(recipe_file.dump_recipe(recipe))
    assert recipe_file.load_recipe(tmp_path / "again.yaml") == recipe
    assert "temperature: 0.5" in recipe_file.dump_recipe(recipe)


@check_each(
    ("key", "says"),
    [
        ("temprature: 0.5", r"yaml:7: algorithm.temprature is not a key of mine_\d+:Mine; did you mean temperature\?"),
        ("temperature: warm", "mine.yaml:7: algorithm.temperature: expected a number, got 'warm'"),
        ("best_of_n: 6", "best_of_n 6 is more than rollout.group_size 4"),  # a rule of all algorithms
    ],
)
def test_wrong_keys_and_values_are_one_line_errors(load, key, says):
    with pytest.raises(RecipeError, match=f"{says}$") as caught:
        load(SETTINGS, key)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        (SETTINGS, "Other", "has no class 'Other'"),
        (SETTINGS, "Bare", "the class needs an attribute Settings, a subclass of RlSettings"),
        (FORWARD_PROCESS, *("Mine", "the class needs an attribute Settings, a subclass of ForwardProcessSettings")),
        ("import no_such_library", "Mine", r"failed in .*py:1: ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\nx.y()", "Mine", r"failed in .*py:2: AttributeError: 'int' object has no attribute 'y'"),
        ("def f(:", "Mine", r"failed in .*py:1: SyntaxError: "),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence_with_its_line(load, source, name, says):
    with pytest.raises(RecipeError, match=rf"mine.yaml:6: algorithm.name mine_\d+:{name}: .*{says}"):
        load(source, name=name)


@check_each(
    ("name", "says"),
    [
        ("not_there.mine:Mine", r":6: .*cannot import 'not_there.mine' .* run in its folder"),
        ("mine.Mine", r"expected one of sft, .*, package.module:Class, got 'mine.Mine'"),
    ],
)
def test_a_class_that_is_not_there_is_named(tmp_path, name, says):
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("MODULE:Mine", name))
    with pytest.raises(RecipeError, match=says):
        recipe_file.load_recipe(tmp_path / "mine.yaml")
