"""What is particular to Wan: its text, its times, its two experts, and which of its variants are taken.

That it does what the stock pipelines do is in test_families.py.
"""

import json
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from families import CASES, EXACT, PROMPTS, denoise_latents, load_reference_pipeline, run_reference_pipeline
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.tiny.wan21 import TRANSFORMER
from wfm_ds.models.wan import Experts
from wfm_ds.sampling.latents import draw_cpu_normal

FAMILIES = ("wan21", "wan22", "wan22_ti2v")


def noise_for(model, family):
    return draw_cpu_normal([1, 2], model.latent_shape(*CASES[family].size))


def seen_by(network, call):
    """The keyword arguments of each forward of a network during the call."""
    seen = []
    handle = network.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        call()
    handle.remove()
    return seen


# Text


def test_rows_past_the_prompt_are_zero(load):
    embeds = load("wan21").encode_text(["the digit 7"])["prompt_embeds"][0]
    assert embeds.shape == (16, 32)
    assert bool(embeds[:4].any(1).all())  # three words and the end mark
    assert not embeds[4:].any()


def test_text_is_repaired_as_at_inference(load):
    """Diffusers leaves this out, without a word, where ftfy is not installed."""
    broken, meant = "a cat\u00e2\u20ac\u2122s  digit &amp; 7", "a cat's digit & 7"
    embeds = load("wan21").encode_text([broken, meant])["prompt_embeds"]
    assert torch.equal(embeds[0], embeds[1])


# Sizes


@given(height=st.integers(-16, 600), width=st.integers(-16, 600), num_frames=st.integers(-2, 200))
@settings(max_examples=200, deadline=None)
def test_exactly_the_sizes_that_the_network_takes_have_a_shape(load, height, width, num_frames):
    model = load("wan21")  # VAE factors 8 and 4, patches 2x2, 32 positions on each axis
    spatial = all(size % 16 == 0 and 16 <= size <= 512 for size in (height, width))
    if spatial and num_frames % 4 == 1 and 1 <= num_frames <= 125:
        assert model.latent_shape(height, width, num_frames) == (4, (num_frames + 3) // 4, height // 8, width // 8)
    else:
        with pytest.raises(ValueError, match=r"multiple of 16, from 16 to 512|must be 4 \* k \+ 1"):
            model.latent_shape(height, width, num_frames)


def test_the_longest_video_runs(load):
    model = load("wan21")
    latents = torch.randn(1, *model.latent_shape(16, 16, 125))
    assert latents.shape[2] == 32
    with torch.no_grad():
        assert model.denoise(latents, torch.ones(1), model.encode_text(PROMPTS[:1])).shape == latents.shape


@check_each("family", FAMILIES)
def test_tokens_are_counted_in_patches(load, family):
    shape = load(family).latent_shape(*CASES[family].size)
    assert load(family).num_tokens(shape) == shape[1] * shape[2] * shape[3] // 4


def test_the_first_latent_frame_depends_on_the_first_frame_alone(load):
    """So that an image can be given to a video of any length."""
    model = load("wan22_ti2v")
    pixels = torch.rand(1, 3, 9, 64, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.encode_pixels(pixels)[:, :, :1], model.encode_pixels(pixels[:, :, :1]), **EXACT)


# Time


def test_the_network_gets_its_time_as_an_unrounded_float(load):
    model, noise = load("wan21"), noise_for(load("wan21"), "wan21")
    sigma, text = torch.tensor([1.0, 0.12345]), model.encode_text(PROMPTS)
    (seen,) = seen_by(model.denoiser, lambda: model.denoise(noise, sigma, text))
    assert seen["timestep"].dtype == torch.float32
    torch.testing.assert_close(seen["timestep"], torch.tensor([1000.0, 123.45]))


def test_ti2v_gets_a_time_for_each_token_and_0_on_given_frames(load):
    model, noise = load("wan22_ti2v"), noise_for(load("wan22_ti2v"), "wan22_ti2v")  # 3 frames of 2 x 1 tokens
    conditioning = add_clean_frames(model.encode_text(PROMPTS), noise, torch.tensor([1, 0]))
    (seen,) = seen_by(model.denoiser, lambda: model.denoise(noise, torch.tensor([0.5, 0.25]), conditioning))
    want = torch.tensor([[0.0, 0, 500, 500, 500, 500], [250.0] * 6])
    torch.testing.assert_close(seen["timestep"], want)


def test_only_ti2v_takes_given_frames(load):
    allowed = {family: load(family).conditioning_frame_counts for family in FAMILIES}
    assert allowed == {"wan21": (0,), "wan22": (0,), "wan22_ti2v": (0, 1)}


# Experts


def test_each_noise_level_reaches_its_expert(load):
    model = load("wan22")
    assert model.sigma_ranges == ((0.875, 1.0), (0.0, 0.875))
    assert [model.select_expert(s) for s in (1.0, 0.9, 0.875, 0.8749, 1e-6)] == [0, 0, 0, 1, 1]
    noise, text = noise_for(model, "wan22"), model.encode_text(PROMPTS)
    outputs = []
    for level, expert, other in ((0.875, 0, 1), (0.8749, 1, 0)):
        sigma = torch.full((2,), level)
        parts = (model.pipeline.transformer, model.pipeline.transformer_2)
        ran = [seen_by(part, lambda s=sigma: model.denoise(noise, s, text)) for part in parts]
        assert [len(calls) for calls in ran] == [1 - expert, expert]
        with torch.no_grad():
            outputs.append(model.denoise(noise, sigma, text, expert))
        with pytest.raises(ValueError, match="all of sigma must belong to one expert"):
            model.denoise(noise, sigma, text, other)
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


def test_a_batch_of_both_experts_is_refused(load):
    model, noise = load("wan22"), noise_for(load("wan22"), "wan22")
    with pytest.raises(ValueError, match="all of sigma must belong to one expert"):
        model.denoise(noise, torch.tensor([0.9, 0.8]), model.encode_text(PROMPTS))


@pytest.mark.parametrize(("family", "experts"), [("wan21", 1), ("wan22", 2)])
def test_an_expert_that_is_not_there_is_refused(load, family, experts):
    model = load(family)
    with pytest.raises(ValueError, match=f"experts 0 to {experts - 1}, got {experts}"):
        model.denoise(noise_for(model, family), torch.ones(2), model.encode_text(PROMPTS), experts)


def test_each_expert_has_its_own_guidance_scale_in_the_stock_pipeline(load, tiny_pipelines):
    model, case = load("wan22"), CASES["wan22"]
    noise, grid = noise_for(model, "wan22"), load("wan22").sigmas(5, (4, 2, 4, 6))
    assert {model.select_expert(s) for s in grid[:-1].tolist()} == {0, 1}
    call = {**model.pipeline_call_kwargs(4.0, *case.size), "guidance_scale_2": 2.5, "latents": noise}
    want = run_reference_pipeline(load_reference_pipeline(tiny_pipelines("wan22"), case), case, grid, **call)
    contrast = model.encode_text(["", ""])
    scales = {0: 4.0, 1: 2.5}
    options = {"solver": "ode", "guidance_scale": scales, "uncond": contrast}
    got = denoise_latents(model, noise, model.encode_text(PROMPTS), grid, **options)
    torch.testing.assert_close(got, want, **EXACT)


def test_both_experts_are_the_denoiser_and_all_else_is_frozen(load):
    model = load("wan22")
    assert isinstance(model.denoiser, Experts)
    assert model.denoiser_components == ("transformer", "transformer_2")
    assert model.denoiser.networks == [model.pipeline.transformer, model.pipeline.transformer_2]
    assert model.auxiliary_modules() == [model.pipeline.vae, model.pipeline.text_encoder]
    assert load("wan21").denoiser is load("wan21").pipeline.transformer
    assert load("wan21").denoiser_components == ("transformer",)


def test_training_from_scratch_gives_each_expert_weights_of_its_own(tiny_pipelines):
    model = registry.load_model(tiny_pipelines("wan22"), dtype=torch.float32, device="cpu")
    before = [p.clone() for p in model.denoiser.parameters()]
    registry.randomize_denoiser(model, 3)
    first, second = (list(part.parameters()) for part in model.denoiser.networks)
    drawn = [i for i, p in enumerate(first) if p.ndim > 1]
    for old, new in ((before[: len(first)], first), (before[len(first) :], second), (first, second)):
        assert not any(torch.equal(old[i], new[i]) for i in drawn)


# Variants


def changed(tiny_pipelines, tmp_path, family, **values):
    """A copy of a tiny pipeline whose model_index.json says something else."""
    folder = tmp_path / family
    shutil.copytree(tiny_pipelines(family), folder)
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


AS_IMAGE_TO_VIDEO = {
    "_class_name": "WanImageToVideoPipeline",
    "image_encoder": [None, None],
    "image_processor": [None, None],
}


@pytest.mark.parametrize(("family", "boundary"), [("wan21", 0.9), ("wan22", None)])
def test_half_a_pair_of_experts_is_refused(tiny_pipelines, tmp_path, family, boundary):
    folder = changed(tiny_pipelines, tmp_path, family, boundary_ratio=boundary)
    with pytest.raises(ModelError, match="must have both transformer_2 and boundary_ratio, or neither"):
        registry.load_model(folder, dtype=torch.float32, device="cpu")


def test_other_channels_are_refused(tiny_pipelines, tmp_path):
    folder = changed(tiny_pipelines, tmp_path, "wan21", **AS_IMAGE_TO_VIDEO)
    WanTransformer3DModel(**TRANSFORMER | {"in_channels": 9}).save_pretrained(folder / "transformer")
    with pytest.raises(ModelError, match=r"9 input channels is not supported, only 4 \(latents\) or 12 \(latents"):
        registry.load_model(folder, dtype=torch.float32, device="cpu")


def test_ti2v_may_be_stored_as_an_image_to_video_pipeline(load, tiny_pipelines, tmp_path):
    folder = changed(tiny_pipelines, tmp_path, "wan22_ti2v", **AS_IMAGE_TO_VIDEO)
    model = registry.load_model(folder, dtype=torch.float32, device="cpu")
    arguments = noise_for(model, "wan22_ti2v"), torch.tensor([0.7, 0.3]), model.encode_text(PROMPTS)
    with torch.no_grad():
        assert torch.equal(model.denoise(*arguments), load("wan22_ti2v").denoise(*arguments))


# What diffusers does otherwise than one would think. A test that fails says that a detour can go.


def test_diffusers_loads_a_second_denoiser_unless_the_pipelines_own_class_is_asked(load, tiny_pipelines):
    """models/loading.py asks the class. DiffusionPipeline ignores a passed part that the class calls optional."""
    ours, folder = load("wan21").pipeline.transformer, tiny_pipelines("wan21")
    assert DiffusionPipeline.from_pretrained(folder, transformer=ours).transformer is not ours


def test_the_stock_scheduler_rounds_the_time_down(load):
    """Hence the comparisons with GridEuler: the network is trained at, and here asked for, the exact time."""
    scheduler = load("wan21").pipeline.scheduler
    scheduler.set_timesteps(5)
    assert scheduler.timesteps.dtype == torch.int64
    assert torch.equal(scheduler.timesteps, (1000 * scheduler.sigmas[:-1]).long())
