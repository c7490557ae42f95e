"""Validation and `wfm_ds.cli.generate` sample with a solver of the same order as the pipeline's scheduler."""

import pytest
import torch

from families import CASES, PROMPTS, load_reference_pipeline
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.sampling.plan import deterministic_plan
from wfm_ds.types import Prompt

pytestmark = pytest.mark.slow

STEPS = 10
MULTISTEP = ["sana", "wan21", "sana_video", "wan22", "wan22_ti2v", "cosmos25"]


def sampler(folder, family, **settings):
    case = CASES[family]
    model = registry.load_model(folder, dtype=torch.float32, device="cpu", **case.load_options)
    height, width, frames = case.size
    recipe = SamplingRecipe(height=height, width=width, num_frames=frames, eval_steps=STEPS, **settings)
    return Sampler(model=model, text_cache=TextCache(model), settings=recipe, forward=CountingForward(model.denoise))


def drawn(ours, pixels):
    """Return the maximum and mean absolute difference between our samples and `pixels`, both in [0, 1]."""
    prompts = [Prompt(id=text, text=text) for text in PROMPTS]
    clean = ours.generate("validation", prompts, [0, 1], ours.evaluation_plan()).clean_latents
    difference = (ours.model.decode_latents(clean) - pixels).abs()
    return float(difference.max()), float(difference.mean())


@pytest.mark.parametrize("family", MULTISTEP)
def test_samples_are_nearer_to_the_stock_pipeline_s_than_euler_s(tiny_pipelines, family):
    folder, case = tiny_pipelines(family), CASES[family]
    ours, euler = sampler(folder, family), sampler(folder, family, eval_solver="ode")
    assert (ours.eval_solver, euler.eval_solver) == ("dpm2", "ode")
    noise = draw_cpu_normal([0, 1], ours.latent_shape, torch.device("cpu"))
    call = ours.model.pipeline_call_kwargs(1.0, *case.size) | {"num_inference_steps": STEPS, "output_type": "pt"}
    pixels = load_reference_pipeline(folder, case)(prompt=PROMPTS, latents=noise, **call)[0]
    pixels = pixels.transpose(1, 2) if ours.model.is_video else pixels  # diffusers returns [B, T, C, H, W]
    (most, mean), (most_of_euler, mean_of_euler) = drawn(ours, pixels), drawn(euler, pixels)
    assert most < 0.5 * most_of_euler
    assert mean < 0.6 * mean_of_euler


def test_a_first_order_scheduler_selects_euler(tiny_pipelines):
    assert sampler(tiny_pipelines("sd3"), "sd3").eval_solver == "ode"
    assert sampler(tiny_pipelines("sd3"), "sd3", eval_solver="dpm2").eval_solver == "dpm2"


@pytest.mark.parametrize("family", ["sd3", *MULTISTEP])
def test_ten_dpm2_steps_are_nearer_to_the_exact_result_than_ten_euler_steps(tiny_pipelines, family):
    """Compare with the exact solution for Gaussian data of mean 1 and std 1/2: noise z ends at 1 + z/2."""

    def velocity(latents, sigma):
        spread = (1 - sigma) ** 2 * 0.25 + sigma**2
        clean = 1 + (1 - sigma) * 0.25 * (latents - (1 - sigma)) / spread
        return (latents - clean) / sigma

    model = registry.load_model(tiny_pipelines(family), dtype=torch.float32, device="cpu", **CASES[family].load_options)
    grid = model.sigmas(STEPS, model.latent_shape(*CASES[family].size))
    noise = torch.randn(200, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    errors = [
        (deterministic_plan(solver, grid).denoise(velocity, noise, [0] * 200).clean_latents - (1 + noise / 2))
        .square()
        .mean()
        for solver in ("dpm2", "ode")
    ]
    assert errors[0] < 0.9 * errors[1]
