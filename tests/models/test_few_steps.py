"""Validation at even levels, and plain diffusers with the export, generate the same latents in few steps."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.schedulers import scheduling_flow_match_euler_discrete

from each_case import check_each
from families import CASES, PROMPTS, create_prompts, each_family, load_tiny, make_sampler, sample_latents
from wfm_ds.contract.case import denoise_latents, load_reference_pipeline, run_reference_pipeline
from wfm_ds.contract.export_checks import ExportSource
from wfm_ds.contract.family_under_test import SEEDS, FamilyUnderTest
from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.runs.model_loading import load_model
from wfm_ds.sampling.denoise import step_noise_seeds
from wfm_kernels.torch_backend import normal_noise

RECIPES = Path(__file__).parents[1] / "recipes"
SIZE = {"height": 32, "width": 32}
NOISY = {"solver": "cps", "noise_level": 1.0, "eval_solver": "cps"}


def settings(subject, **keys):
    height, width, frames = subject.size
    return SamplingRecipe(height=height, width=width, num_frames=frames, eval_grid="even", **keys)


def validation_latents(subject, sampling):
    model, w = subject.model, sampling.guidance_scale
    uncond = subject.encode_negative_prompt(model) if w > 1 else None
    text, grid = subject.encode_prompts(model, PROMPTS), model.evaluation_sigmas(sampling)
    return denoise_latents(model, subject.initial_noise(), text, grid, solver="ode", guidance_scale=w, uncond=uncond)


def export(model, sampling, out):
    target, chosen = ExportTarget.from_model(model, sampling), {"policy": "train", "dtype": torch.float32}
    return export_weights(target, ExportSource(model, uses_lora=False), out, is_main=True, **chosen)


def plain_latents(subject, folder):
    """Generate with diffusers alone: only the folder's call.json, the noise and the inputs are passed."""
    own_scheduler = dataclasses.replace(subject.case, has_euler_scheduler=True)
    pipeline = load_reference_pipeline(folder, subject.case)
    call = json.loads((folder / "call.json").read_text())
    call = {name: tuple(value) if name == "sigmas" else value for name, value in call.items() if name != "prompt"}
    in_folder = {*call, "guidance_scale", "guider"}
    inputs = {n: v for n, v in subject.pipeline_call_kwargs(1.0).items() if n not in in_folder}
    grid = range(call["num_inference_steps"] + 1)
    latents = run_reference_pipeline(pipeline, own_scheduler, grid, **inputs | call)
    return latents if subject.case.unpack_latents is None else subject.case.unpack_latents(subject.model, latents)


@each_family()
def test_plain_diffusers_generates_validation_s_samples_in_four_two_and_one_steps(family, tiny_pipelines, tmp_path):
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    drawn = []
    for steps, w in ((4, 1.0), (2, 4.0), (1, 1.0)):
        sampling = settings(subject, eval_steps=steps, guidance_scale=w)
        try:
            subject.model.check_sampling(sampling)
        except ModelError:  # the network has no guidance of this kind
            sampling = settings(subject, eval_steps=steps)
        folder = export(subject.model, sampling, tmp_path / str(steps))
        want = validation_latents(subject, sampling)
        torch.testing.assert_close(plain_latents(subject, folder), want, rtol=0, atol=subject.case.tolerance)
        drawn.append(want)
    assert all((one - other).abs().max() > 1e-2 for one, other in itertools.pairwise(drawn))


@each_family(["z_image", "qwen_image", "wan21", "cosmos25"])
def test_a_shift_of_the_recipe_reaches_plain_diffusers(family, tiny_pipelines, tmp_path):
    """The scheduler of the released Cosmos-Predict2.5 has Karras levels, which have no shift."""
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    if family == "cosmos25":
        config = subject.model.pipeline.scheduler.config
        subject.model.pipeline.scheduler = UniPCMultistepScheduler.from_config(config, use_karras_sigmas=True)
        with pytest.raises(
            ModelError, match=r"no fixed shift: set sampling\.grid_shift, or sampling\.eval_grid: stock"
        ):
            subject.model.evaluation_sigmas(settings(subject, eval_steps=3))
    sampling = settings(subject, eval_steps=3, grid_shift=7.0)
    assert subject.model.evaluation_sigmas(sampling).tolist() == pytest.approx([1, 14 / 15, 7 / 9, 0])
    folder = export(subject.model, sampling, tmp_path / "out")
    want = validation_latents(subject, sampling)
    torch.testing.assert_close(plain_latents(subject, folder), want, rtol=0, atol=subject.case.tolerance)
    again = load_tiny(folder, family)
    # The exported folder is a base model with the same levels.
    kept = again.evaluation_sigmas(settings(subject, eval_steps=3))
    torch.testing.assert_close(kept, subject.model.evaluation_sigmas(sampling), rtol=0, atol=1e-6)


def test_levels_that_plain_diffusers_cannot_use_are_refused(tiny_pipelines):
    words = ["sampling.eval_grid=even", "sampling.eval_steps=50", "sampling.grid_shift=30"]
    recipe = recipe_file.load_recipe(RECIPES / "wan_nft.yaml", [*words, f"model.path={tiny_pipelines('wan21')}"])
    with pytest.raises(ModelError, match="WanPipeline of diffusers cannot use the even noise levels of 50 steps"):
        load_model(recipe, torch.device("cpu"))
    model = load_tiny(tiny_pipelines("sd3"), "sd3")
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_exponential_sigmas=True)
    with pytest.raises(ModelError, match=r"cannot use .* of 4 steps: set sampling\.eval_grid: stock"):
        ExportTarget.from_model(model, SamplingRecipe(**SIZE, eval_grid="even", eval_steps=4))


@each_family(["sd3", "wan21"])
def test_plain_diffusers_adds_noise_as_validation_does(family, tiny_pipelines, tmp_path, monkeypatch):
    """With the noise of the validation samples, the exported scheduler generates these samples."""
    subject = FamilyUnderTest(tiny_pipelines(family), CASES[family])
    model, noise_steps = subject.model, itertools.count()

    def draw_validation_noise(shape, **options):
        seeds = step_noise_seeds(SEEDS, next(noise_steps))
        return normal_noise(seeds, math.prod(shape[1:])).view(shape)

    monkeypatch.setattr(scheduling_flow_match_euler_discrete, "randn_tensor", draw_validation_noise)
    sampler = make_sampler(model, subject.size, eval_grid="even", eval_steps=4, guidance_scale=2.0, **NOISY)
    folder = export(model, sampler.settings, tmp_path / "out")
    want = sample_latents(sampler, create_prompts(*PROMPTS), SEEDS)
    torch.testing.assert_close(plain_latents(subject, folder), want, rtol=0, atol=2 * subject.case.tolerance)
    assert next(noise_steps) == 4
    # A LoRA trained without noise on this pipeline needs a scheduler without noise.
    again = load_tiny(folder, family)
    target = ExportTarget.from_model(again, settings(subject, eval_steps=4))
    assert target.scheduler["stochastic_sampling"] is False


def test_exports_with_stock_levels_stay_as_they_were(tiny_pipelines, tmp_path):
    model = load_tiny(tiny_pipelines("wan21"), "wan21")
    target = ExportTarget.from_model(model, SamplingRecipe(**SIZE, num_frames=5, eval_steps=4))
    assert target == ExportTarget.from_model(model)
    assert target.to_json().keys() == {"base", "parts", "call"}


@check_each(
    ("keys", "message"),
    [
        ({"eval_grid": "even", "eval_solver": "dpm2"}, "eval_grid: even does not work with eval_solver: dpm2"),
        ({"grid_shift": 5.0}, "grid_shift has no effect on stock levels"),
        ({"eval_grid": "even", "grid_shift": 0.0}, "greater than 0"),
        ({"eval_grid": [1.0, 0.5]}, "'stock' or 'even'"),
        (NOISY, "eval_solver: cps needs eval_grid: even"),
        ({**NOISY, "eval_grid": "even", "noise_level": None}, "noise_level: 1, the only .* got cps and None"),
        ({**NOISY, "eval_grid": "even", "solver": "flow_sde"}, "needs solver: cps .* got flow_sde and 1"),
        ({**NOISY, "eval_grid": "even", "eval_steps": 1}, "needs at least 2 eval_steps"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        SamplingRecipe(**SIZE, **keys)
