"""Recipes that are too long or nested too deeply, and values that no run can have."""

import os
import time

import pytest

from each_case import check_each
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file

GOOD = """\
run: {output_dir: out, steps: 3}
model: {path: tiny:sd3}
lora: {rank: 4}
data: {kind: prompts, path: prompts}
sampling: {height: 64, width: 64}
algorithm: {name: diffusion_nft}
rollout: {group_size: 4}
reward:
  functions:
  - {name: ocr, options: {}}
"""
NESTED = "run: " + "[" * 5000 + "]" * 5000
MOMENT_S = 60.0  # a hang ends here; it takes a second or two


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_text(text, *overrides):
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return recipe_file.load_recipe((tmp_path / "r.yaml").relative_to(tmp_path), overrides)

    return load_text


def refused(load, *args):
    """The one line that is said."""
    began = time.monotonic()
    with pytest.raises(RecipeError) as caught:
        load(*args)
    assert time.monotonic() - began < MOMENT_S
    [line] = str(caught.value).split("\n")
    assert len(line) < 1000
    return line


@check_each(
    ("text", "message"),
    [
        ("run: [" + "1, " * 700_000 + "]", "r.yaml: a recipe has at most 1,048,576 characters"),
        (NESTED, "r.yaml: nested too deeply"),
        ("{" * 5000, "r.yaml: nested too deeply"),
        ("run: &a {steps: *a}", "r.yaml:1: an alias contains itself"),
    ],
)
def test_a_recipe_beyond_the_limits_is_refused_in_a_moment(load, text, message):
    assert refused(load, text) == message


@check_each(
    ("word", "message"),
    [
        ("run.steps=" + "[" * 5000, "nested too deeply"),
        ("run." + "s" * 100_000 + "=1", "is not a key of run"),
        ("run.steps=" + "9" * 99, "expected a whole number > 0, at most 2**63 - 1"),
        ("run.steps=1e30", "expected a whole number > 0, at most 2**63 - 1"),
        ("run.steps=.inf", "expected a whole number > 0"),
        ("optimizer.lr=.inf", "expected a number > 0 that is finite, got inf"),
        ("optimizer.lr=1e999", "expected a number > 0 that is finite, got inf"),
        ("lora.alpha=.inf", "expected a number > 0 that is finite, got inf"),
        ("reward.functions.0.weight=-.inf", "expected a number that is finite, got -inf"),
        ("reward.clip=[0, .inf]", "expected a number that is finite, got inf"),
        ("lora.alpha=.nan", "nan is not allowed"),
        ("lora.rank=99999999999", "expected a whole number > 0 and <= 65536"),
        ("reward.functions.0.workers=99999999999", "expected a whole number >= 1 and <= 256"),
        ("data.workers=99999999999", "expected a whole number >= 1 and <= 256"),
        ("rollout.spawn=99999999999", "expected a whole number >= 0 and <= 256"),
        ("reward.functions.0.name=color/", "expected NAME, NAME/LABEL or package.module:Class, got 'color/'"),
        ("reward.functions.0.name=/color", "expected NAME, NAME/LABEL or package.module:Class"),
        ("reward.functions.0.name=''", "expected NAME, NAME/LABEL or package.module:Class"),
        ("model.path=" + "a/" * 50_000, "a path has at most 3500 bytes"),
        ("model.path=" + "a" * 300, "a file or folder name has at most 255 bytes"),
        ("run.output_dir=" + "a/" * 50_000, "a path has at most"),
        ("data.path=" + "a" * 300, "a file or folder name has at most 255 bytes"),
        ("data.cache_dir=~nobody_of_this_name/x", "this machine has no such user"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(load, word, message):
    assert message in refused(load, GOOD, word)


def test_an_over_long_defaults_is_a_file_that_is_not_there(load):
    assert "not found (relative to the including file)" in refused(load, f"defaults: {'a' * 100_000}\n" + GOOD)
    assert "not found (relative to the including file)" in refused(load, f"defaults: {'a/' * 50_000}\n" + GOOD)


def test_a_device_without_end_is_refused(load, tmp_path):
    os.symlink("/dev/zero", tmp_path / "endless.yaml")
    with pytest.raises(RecipeError):
        recipe_file.load_recipe(tmp_path / "endless.yaml")


def test_many_problems_are_cut_short(load):
    with pytest.raises(RecipeError) as caught:
        load(GOOD + "".join(f"k{i}: 1\n" for i in range(300)))
    lines = str(caught.value).split("\n")
    assert len(lines) == 41
    assert lines[-1] == "and 260 more problems: fix these first"
