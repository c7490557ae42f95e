"""Validation and `wfm_ds.cli.generate` sample with a solver of the same order as the pipeline's scheduler."""

import pytest
import torch

from families import CASES, PROMPTS, create_prompts, load_reference_pipeline, make_sampler, sample_latents
from velocities import gaussian
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.sampling.plan import deterministic_plan

pytestmark = pytest.mark.slow

STEPS = 10
MULTISTEP = ["sana", "wan21", "sana_video", "wan22", "wan22_ti2v", "cosmos25"]


def sampler(load, family, **settings):
    return make_sampler(load(family), CASES[family].size, eval_steps=STEPS, **settings)


def drawn(ours, pixels):
    """Return the maximum and mean absolute difference between our samples and `pixels`, both in [0, 1]."""
    difference = (ours.model.decode_latents(sample_latents(ours, create_prompts(*PROMPTS), [0, 1])) - pixels).abs()
    return float(difference.max()), float(difference.mean())


@pytest.mark.parametrize("family", MULTISTEP)
def test_samples_are_nearer_to_the_stock_pipeline_s_than_euler_s(load, tiny_pipelines, family):
    folder, case = tiny_pipelines(family), CASES[family]
    ours, euler = sampler(load, family), sampler(load, family, eval_solver="ode")
    assert (ours.eval_solver, euler.eval_solver) == ("dpm2", "ode")
    noise = draw_cpu_normal([0, 1], ours.latent_shape, torch.device("cpu"))
    call = ours.model.pipeline_call_kwargs(1.0, *case.size) | {"num_inference_steps": STEPS, "output_type": "pt"}
    pixels = load_reference_pipeline(folder, case)(prompt=PROMPTS, latents=noise, **call)[0]
    pixels = pixels.transpose(1, 2) if ours.model.is_video else pixels  # diffusers returns [B, T, C, H, W]
    (most, mean), (most_of_euler, mean_of_euler) = drawn(ours, pixels), drawn(euler, pixels)
    assert most < 0.5 * most_of_euler
    assert mean < 0.6 * mean_of_euler


def test_a_first_order_scheduler_selects_euler(load):
    assert sampler(load, "sd3").eval_solver == "ode"
    assert sampler(load, "sd3", eval_solver="dpm2").eval_solver == "dpm2"


@pytest.mark.parametrize("family", ["sd3", *MULTISTEP])
def test_ten_dpm2_steps_are_nearer_to_the_exact_result_than_ten_euler_steps(load, family):
    """Compare with the exact solution for Gaussian data of mean 1 and std 1/2: noise z ends at 1 + z/2."""
    grid = load(family).sigmas(STEPS, load(family).latent_shape(*CASES[family].size))
    noise = torch.randn(200, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    errors = [
        (deterministic_plan(solver, grid).denoise(gaussian(1.0, 0.5), noise, [0] * 200).clean_latents - (1 + noise / 2))
        .square()
        .mean()
        for solver in ("dpm2", "ode")
    ]
    assert errors[0] < 0.9 * errors[1]
