"""Sampling options that the user omits come from the call.json of the LoRA or the pipeline."""

import contextlib
import json
import re

import pytest

from commands import wfm_command
from each_case import check_each
from wfm_ds.cli import generate
from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.errors import UserError
from wfm_ds.models import registry
from wfm_ds.models.even_scheduler import build_even_scheduler


@pytest.fixture
def lora(tmp_path):
    (tmp_path / "lora").mkdir()
    return tmp_path / "lora"


def filled(family, lora, *words, repo="m", call=None):
    """Return the options after they are filled from the call.json of a LoRA. call: written to this file."""
    if call is not None:
        (lora / "call.json").write_text(json.dumps(call))
    required = ["--model", "m", "--prompts", "p.txt", "--out", "o", "--height", "32", "--width", "32"]
    args = generate.parser().parse_args([*required, *words])
    fill_from_call(args, repo, registry.resolve_pipeline(f"tiny:{family}"), [lora])
    return args


LEVELS = {"num_inference_steps": 4, "sigmas": [1.0, 0.75, 0.5, 0.25], "guidance_scale": 1.0}
EXPERTS = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


@check_each(
    ("family", "call", "words", "want"),
    [
        ("sd3", {}, "", (40, "stock", 1.0, None)),
        ("sd3", LEVELS, "", (4, "even", 1, None)),
        ("sd3", {"sigmas": [1, 0.6666667, 0.3333333]}, "--guidance 3", (3, "even", 3.0, None)),
        ("sd3", {"sigmas": [1.0]}, "--steps 2 --grid stock", (2, "stock", 1.0, None)),
        ("sd3", {"num_inference_steps": 8, "guidance_scale": 0}, "", (8, "stock", 1.0, None)),
        ("qwen_image", {"true_cfg_scale": 4.0, "guidance_scale": 9}, "", (40, "stock", 4.0, None)),
        ("z_image", {"guidance_scale": 0.0}, "", (40, "stock", 1.0, None)),
        ("cosmos25", {"guidance_scale": 7.0}, "", (40, "stock", 8.0, None)),
        ("flux2_dev", {"guidance_scale": 2.5}, "", (40, "stock", 1.0, None)),
        ("flux_kontext", {"true_cfg_scale": 3.0, "guidance_scale": 2.5}, "", (40, "stock", 3.0, None)),
        ("wan22", EXPERTS, "", (40, "stock", 4.0, 3.0)),
        ("wan22", EXPERTS, "--guidance 5", (40, "stock", 5.0, None)),
    ],
)
def test_omitted_options_come_from_call_json(lora, family, call, words, want):
    args = filled(family, lora, *words.split(), call=call)
    assert (args.steps, args.grid, args.guidance, args.guidance_low) == want


@check_each(
    ("steps", "place", "want"),
    [
        (4, "scheduler", ("even", 7.0)),  # of a pipeline
        (1, "scheduler", ("stock", None)),  # its only level is 1 anyway
        (4, ".", ("even", 7.0)),  # of a LoRA; the cases share the folder, and this file comes first
        (1, ".", ("even", 7.0)),
    ],
)
def test_the_scheduler_of_an_export_has_the_levels(lora, steps, place, want):
    build_even_scheduler(7.0, steps, 1000).save_config(lora / place)
    cases = (((), want), (("--grid", "stock"), ("stock", None)), (("--grid", "even"), ("even", want[1])))
    for words, expected in cases:
        args = filled("wan21", lora, *words, call={"num_inference_steps": steps})
        assert (args.grid, args.shift and round(args.shift, 12)) == expected


def test_the_scheduler_of_an_export_says_whether_steps_add_noise(lora):
    build_even_scheduler(7.0, 4, 1000, stochastic_sampling=True).save_config(lora)
    for words, want in (("", "cps"), ("--solver ode", "ode"), ("--grid stock", None), ("--steps 1", None)):
        assert filled("wan21", lora, *words.split(), call={"num_inference_steps": 4}).solver == want, words


FOG = {"negative_prompt": "fog"}


@check_each(
    ("family", "call", "words", "want"),
    [
        ("sd3", {}, [], (None, None, None)),
        ("sd3", {"max_sequence_length": 8, "guidance_scale": 3} | FOG, [], (8, "fog", None)),
        ("sd3", FOG, [], (None, None, None)),  # no guidance
        ("sd3", FOG, ["--guidance", "2", "--negative-prompt", ""], (None, "", None)),
        ("flux2_dev", {"max_sequence_length": 8, "guidance_scale": 2.5}, [], (8, None, 2.5)),
        ("flux2_dev", {"guidance_scale": 2.5}, ["--embedded-guidance", "3"], (None, None, 3.0)),
        ("flux2", {"max_sequence_length": 8}, ["--max-sequence-length", "9"], (9, None, None)),
    ],
)
def test_text_length_negative_prompt_and_embedded_guidance_come_from_call_json(lora, family, call, words, want):
    args = filled(family, lora, *words, call=call)
    assert (args.max_sequence_length, args.negative_prompt, args.embedded_guidance) == want


@check_each(
    ("call", "words", "message"),
    [
        ({"guidance_scale": 3}, ["--guidance-batch", "joint"], ""),
        ({"guidance_scale": 3}, ["--guidance-low", "2"], ""),
        ({}, ["--guidance-batch", "joint"], "--guidance-batch: joint needs --guidance above 1"),
        ({}, ["--guidance-low", "2"], "--guidance-low: needs --guidance above 1"),
        ({}, ["--shift", "3"], "--shift: needs --grid even"),
        ({"sigmas": [1.0, 0.5]}, ["--shift", "3", "--solver", "cps"], ""),
        ({"sigmas": [1.0, 0.5]}, ["--solver", "dpm2"], "--solver: dpm2 does not work with --grid even"),
        ({"sigmas": [1.0]}, ["--solver", "cps"], "--solver: cps needs --grid even and at least 2 --steps"),
    ],
)
def test_options_are_compared_after_they_are_filled_and_before_a_model_is_loaded(lora, call, words, message):
    with pytest.raises(UserError, match=re.escape(message)) if message else contextlib.nullcontext():
        filled("sd3", lora, *words, call=call)


@check_each(
    ("change", "message"),
    [
        ({"num_train_timesteps": None}, "num_train_timesteps must be a number above 1, got None; correct it"),
        ({"num_train_timesteps": 1}, "num_train_timesteps must be a number above 1, got 1"),
        ({"shift_terminal": 1}, "shift_terminal must be a number between 0 and 1, got 1"),
        ({"shift_terminal": "low"}, "shift_terminal must be a number between 0 and 1, got 'low'"),
        ({"shift": "high"}, "shift must be a number above 0, got 'high'"),
        ({"shift": -1, "shift_terminal": None}, "shift must be a number above 0, got -1"),
    ],
)
def test_a_wrong_number_in_the_scheduler_of_an_export_is_an_error_of_its_file(lora, change, message):
    build_even_scheduler(7.0, 4, 1000).save_config(lora)
    file = lora / "scheduler_config.json"
    config = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(UserError, match=re.escape(f"{file}: {message}")):
        filled("wan21", lora, call={"num_inference_steps": 4})


def test_a_released_few_step_model_has_its_own_number_of_steps(lora):
    args = filled("z_image", lora, repo="Tongyi-MAI/Z-Image-Turbo", call={})
    assert (args.steps, args.guidance) == (8, 1.0)


@check_each(
    ("call", "message"),
    [
        ({"sigmas": [1.0, 0.9, 0.2]}, "sigmas must be the evenly spaced levels 1, (N - 1)/N, .. 1/N of N steps"),
        ({"sigmas": [0.5, 1.0]}, "sigmas must be the evenly spaced levels"),
        ({"sigmas": []}, "num_inference_steps must be an integer from 1 to 10000, got 0"),
        ({"sigmas": [1.0, None]}, "must be real number"),
        ({"sigmas": 4}, "has no len()"),
        ({"num_inference_steps": 2.5}, "num_inference_steps must be an integer from 1 to 10000, got 2.5"),
        ({"guidance_scale": "high"}, "could not convert string to float"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be a number, got nan"),
        ({"guidance_scale": 2, "negative_prompt": ["fog"]}, "negative_prompt must be a text, got ['fog']"),
    ],
)
def test_values_that_cannot_be_used_are_one_sentence(lora, tmp_path, capsys, tiny_pipelines, call, message):
    folder = tmp_path / "pipeline"
    folder.mkdir()
    for part in tiny_pipelines("sd3").iterdir():
        if part.name != "call.json":
            (folder / part.name).symlink_to(part)
    (folder / "call.json").write_text(json.dumps(call))
    (tmp_path / "a.txt").write_text("a cat\n")
    words = ["--model", str(folder), "--prompts", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    assert wfm_command("generate")([*words, "--height", "32", "--width", "32"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder / 'call.json'}: ")
    assert message in said
    assert said.count("\n") == 1
