"""Python API: it starts the same training command and reads the results from the run folder."""

from pathlib import Path

import pytest

import wfm_ds
from wfm_ds.cli.api import Run
from wfm_ds.demos.digits_data import write_digits
from wfm_ds.errors import RecipeError, UserError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run one step of a tiny SFT recipe from a dictionary."""
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
def test_a_run_from_python_uses_the_command_and_reads_the_run_folder(trained):
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


def test_a_user_error_is_raised_at_once(tmp_path):
    with pytest.raises(RecipeError, match="algorithm"):
        Run.from_recipe({"algorithm": {"name": "nothing"}})
    with pytest.raises(RecipeError, match=r"run\.stepz"):
        Run.from_recipe("sd3_image_sft", {"run.stepz": 1})
    run = Run.from_recipe("sd3_image_sft", {"run.output_dir": tmp_path / "none"}, tiny=True)
    assert (run.recipe.model.path, run.output_dir) == ("tiny:sd3", tmp_path / "none")
    assert (run.samples(), run.metrics()) == ([], [])
    for name in ("step_2", "step_10", "step_x", "step_"):
        (tmp_path / "none" / "samples" / name).mkdir(parents=True)
    row = '{"file": "0.png", "prompt": "a\u2028b\x85c", "seed": 3}\n'
    (tmp_path / "none" / "samples" / "step_2" / "samples.jsonl").write_text(row + "[" * 99999 + '\n7\n{"half\n' + row)
    assert [(one.step, one.prompt) for one in run.samples()] == [(2, "a\u2028b\x85c")] * 2
    with pytest.raises(UserError, match="has not finished, or not started"):
        run.result()
    with pytest.raises(AttributeError):
        wfm_ds.Walk  # noqa: B018
