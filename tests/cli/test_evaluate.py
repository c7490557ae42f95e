"""`wfm evaluate`: how model arguments are resolved, and one-line errors. tests/end_to_end/test_command.py runs it
fully."""

import contextlib
import json
import shutil

import pytest
from safetensors.torch import save

from commands import wfm_command
from each_case import check_each
from wfm_ds.cli import evaluation_models
from wfm_ds.cli.evaluate import parse_names, parser
from wfm_ds.cli.evaluation_settings import fill_options
from wfm_ds.cli.main import main
from wfm_ds.recipe.file import load_stored_recipe

HEADER = save({}, {"lora_adapter_metadata": '{"transformer.r": 2, "transformer.lora_alpha": 2}'})
RECIPE = """
run: {output_dir: %s, steps: 1}
model: {path: "tiny:sd3", dtype: float32}
lora: {rank: 2}
data: {kind: prompts, path: recipes/prompts/colors, name: colors}
sampling: {height: 32, width: 48, eval_steps: 3, guidance_scale: 2.5}
algorithm: {name: diffusion_nft}
rollout: {prompts_per_step: 2, group_size: 2}
reward: {functions: [{name: color, weight: 2}, {name: jpeg_compressibility, weight: 0}]}
"""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a red circle\na blue square\n")
    return path


@pytest.fixture
def lora_run(tmp_path):
    """Write a run folder with two exports that contain only a header."""
    folder = tmp_path / "mine"
    for step in (2, 10):
        (folder / "safetensors" / f"step_{step}" / "lora").mkdir(parents=True)
        (folder / "safetensors" / f"step_{step}" / "lora" / "model.safetensors").write_bytes(HEADER)
    (folder / "recipe.yaml").write_text(RECIPE % folder)
    return folder


def found(*given, out="out"):
    with contextlib.ExitStack() as held:
        return evaluation_models.resolve_models([str(one) for one in given], out, None, held)


def test_a_run_stands_for_its_newest_export_and_its_base(lora_run, tmp_path):
    base, newest = found(lora_run, out=tmp_path)
    assert (base.model, base.lora, base.recipe) == ("tiny:sd3", None, None)
    assert (newest.name, newest.model) == ("mine", "tiny:sd3")
    assert newest.lora == lora_run / "safetensors" / "step_10" / "lora"
    assert newest.recipe.sampling.width == 48


def test_a_lora_uses_the_base_before_it_and_names_are_unique(lora_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(lora_run, other)
    steps = [one / "safetensors" / "step_2" for one in (lora_run, other)]
    entries = found("tiny:sana", steps[0], steps[1] / "lora", "tiny:sana", out=tmp_path)
    assert [one.name for one in entries] == ["tiny_sana_1", "mine_step_2", "other_step_2", "tiny_sana_4"]
    assert [one.model for one in entries] == ["tiny:sana"] * 4
    assert [one.lora is None for one in entries] == [True, False, False, True]


@check_each(("words", "batch"), [([], 4), (["--seeds", "3"], 3), (["--seeds", "20"], 8), (["--batch", "2"], 2)])
def test_the_seeds_of_a_prompt_share_a_batch(lora_run, words, batch):
    args = parser().parse_args(["tiny:sd3", "--prompts", "p.txt", *words])
    fill_options(args, found("tiny:sd3", out=lora_run), load_stored_recipe(lora_run / "recipe.yaml"))
    assert args.batch == batch


def test_steps_levels_and_guidance_come_from_the_recipe_or_else_from_call_json(lora_run, tmp_path):
    """In tiny:sd3, call.json has 2 steps. In the copied LoRA, it has even levels."""
    lora = tmp_path / "lora"
    shutil.copytree(lora_run / "safetensors" / "step_2" / "lora", lora)
    (lora / "call.json").write_text(json.dumps({"sigmas": [1.0, 0.5], "guidance_scale": 3, "height": 64}))
    few = load_stored_recipe(lora_run / "recipe.yaml")
    few, rollout, noisy = (
        few.model_copy(update={"sampling": few.sampling.model_copy(update=keys)})
        for keys in (
            {"eval_grid": "even", "grid_shift": 5.0},
            {"grid": "even", "grid_shift": 5.0},
            {"eval_grid": "even", "eval_solver": "cps"},
        )
    )
    for models, recipe, words, want in (
        (["tiny:sd3", lora_run], few, [], (3, "even", 5.0, 2.5)),
        (["tiny:sd3", lora_run], rollout, [], (3, "stock", None, 2.5)),
        (["tiny:sd3", lora_run], rollout, ["--grid", "even"], (3, "even", 5.0, 2.5)),
        (["tiny:sd3", lora_run], noisy, [], (3, "even", None, 2.5)),
        (["tiny:sd3", lora_run], noisy, ["--grid", "stock"], (3, "stock", None, 2.5)),
        (["tiny:sd3", lora], None, ["--width", "32"], (2, "even", None, 3.0)),
        (["tiny:sd3", lora], None, ["--width", "32", "--grid", "stock", "--steps", "7"], (7, "stock", None, 3.0)),
        (["tiny:sd3"], None, ["--guidance", "2"], (2, "stock", None, 2.0)),
    ):
        args = parser().parse_args(["tiny:sd3", "--prompts", "p.txt", *words])
        fill_options(args, found(*models, out=tmp_path), recipe)
        assert (args.steps, args.grid, args.shift, args.guidance) == want
    assert args.height == 32


def test_names_are_words_with_commas():
    assert parse_names("ocr, color") == ["ocr", "color"]


@check_each(
    ("words", "sentence"),
    [
        ("tiny:sd3 --rewards color,color", "argument --rewards: 'color,color' must be a list of distinct names"),
        ("tiny:sd3", "--rewards is required, e.g. --rewards pickscore; see wfm rewards"),
        ("tiny:sd3 --rewards colour", "unknown reward 'colour'; did you mean color?"),
        ("tiny:sd3 --rewards motion", "reward motion scores videos, but the model generates images"),
        ("tiny:sd3 --rewards gen_eval", "reward gen_eval needs the metadata key 'tag', missing in 2 of 2 prompts"),
        (
            "tiny:sd3 --rewards color --reward-device 7",
            "argument --reward-device: expected cpu, cuda or cuda:N, got '7'",
        ),
        ("tiny:sd3 --rewards color --held-out color", "--held-out: color was used for training, so it is not held out"),
        ("{empty} --rewards color", "{empty} is not a pipeline (no model_index.json), an export or a run"),
        ("{run} --judges color", "--held-out: color was used for training, so it is not held out"),
        ("{run}/safetensors/step_2 --seeds 0", "argument --seeds: '0' is not a positive integer"),
        ("{run}/safetensors/step_2 --seeds 1" + 30 * "0", "argument --seeds: '1" + 30 * "0" + "' is too large"),
        ("{lone} --rewards color", "{lone} is a LoRA without a run: put its base model first"),
        ("{untrained} --rewards color", "{untrained} has no export"),
        ("nowhere --rewards color", "nowhere does not exist"),
        ("{run} --out {run}", "{run} is not empty"),
        ("tiny:sd3 --rewards color --diversity nowhere", "--diversity nowhere cannot be loaded"),
        ("tiny:sd3 --rewards color --width 33", "width must be a multiple of"),
        ("tiny:sana_wm --rewards motion", "tiny:sana_wm: sana_wm needs c2w, intrinsics"),
        ("{run}", "{broken} cannot be read"),
    ],
)
def test_invalid_arguments_are_one_line_errors(words, sentence, lora_run, prompts, tmp_path, capsys):
    places = {name: tmp_path / name for name in ("empty", "lone", "untrained")} | {"run": lora_run}
    places["broken"] = lora_run / "safetensors" / "step_10" / "lora" / "model.safetensors"
    if sentence.startswith("{broken}"):
        places["broken"].write_bytes(b"")
    places["empty"].mkdir()
    shutil.copytree(lora_run / "safetensors" / "step_2" / "lora", places["lone"])
    places["untrained"].mkdir()
    shutil.copy(lora_run / "recipe.yaml", places["untrained"])
    out = tmp_path / "out"
    given = words.format(**places).split()
    given += ["--prompts", str(prompts), *([] if "--out" in given else ["--out", str(out)])]
    assert main(["evaluate", *given]) == 2
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {sentence.format(**places)}")
    assert said.out == ""
    assert "Traceback" not in said.err
    assert not out.exists()


def test_a_single_model_has_scores_without_comparison(tiny_pipelines, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    words = [tiny_pipelines("sd3"), "--prompts", prompts, "--rewards", "color", "--seeds", 1, "--steps", 1]
    assert wfm_command("evaluate")([*words, "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("2 prompts x 1 seed, paired by seed")
    content = json.loads((out / "evaluation.json").read_text())
    assert content["models"] == []
    assert content["base"]["means"]["color"]["low"] is None  # two prompts are too few for an interval
    assert sorted(one.name for one in out.iterdir()) == ["evaluation.csv", "evaluation.json", "index.html", "sd3"]
