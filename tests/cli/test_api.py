"""Runs from Python: the same command, its folder read."""

from pathlib import Path

import pytest

import wfm_ds
from wfm_ds.cli.api import Run
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.errors import RecipeError, UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny SFT run of one step, started from a dictionary."""
    root = Path(__file__).parent.parent.parent
    out = tmp_path_factory.mktemp("api") / "run"
    write_digits(out.parent / "digits")
    overrides = {
        "run.output_dir": out,
        "run.steps": 1,
        "data.path": out.parent / "digits" / "images",
        "validation.num_prompts": 1,
        "validation.seeds": [1000001],
        "logging.console": False,
    }
    by_name = wfm_ds.Run.from_recipe(root / "tests" / "recipes" / "sd3_sft_lora.yaml", overrides)
    values = by_name.recipe.model_dump(mode="json", exclude_defaults=True)
    run = Run.from_recipe(values)
    assert run.recipe == by_name.recipe
    return run.train(gpus=1, show=False)


@pytest.mark.slow
def test_a_run_from_python_is_the_command_s_and_is_read_from_its_folder(trained):
    assert trained.result()["status"] == "finished"
    again = Run.open(trained.output_dir)
    assert again.metrics("sft/loss") == trained.metrics("sft/loss") != []
    assert {sample.step for sample in again.samples()} == {0, 1}
    (last,) = again.samples(step=1)
    assert last.file.is_file()
    assert (last.seed, bool(last.prompt)) == (1000001, True)
    assert trained.page.is_file()
    with pytest.raises(UserError, match="is read-only"):
        again.train()


def test_a_mistake_is_said_at_once(tmp_path):
    with pytest.raises(RecipeError, match="algorithm"):
        Run.from_recipe({"algorithm": {"name": "nothing"}})
    with pytest.raises(RecipeError, match=r"run\.stepz"):
        Run.from_recipe("sd3_image_sft", {"run.stepz": 1})
    run = Run.from_recipe("sd3_image_sft", {"run.output_dir": tmp_path / "none"}, tiny=True)
    assert (run.recipe.model.path, run.output_dir) == ("tiny:sd3", tmp_path / "none")
    assert (run.samples(), run.metrics()) == ([], [])
    with pytest.raises(UserError, match="has not finished, or not started"):
        run.result()
    with pytest.raises(AttributeError):
        wfm_ds.Walk  # noqa: B018
