"""Network calls, sizes, noise levels and experts, with the same tests for several families."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from families import CASES, PROMPTS, each_family, load_reference_pipeline, load_tiny, record_calls
from wfm_ds.models import registry
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.sampling.latents import draw_cpu_normal

FLOAT_TIMES = ("sd3", "wan21", "sana", "sana_video", "hunyuan_video15")
# Required multiple of height and width, their maximum, the maximum number of frames, and the VAE's spatial factor.
# A frame count of 4 k + 1 gives k + 1 latent frames. A token is a patch of 2 x 2 latents (SANA: one latent).
SIZES = {
    "sd3": (4, 128, 1, 2),
    "sana": (32, 10_000, 1, 4),
    "sana_video": (32, 512, 125, 8),
    "wan21": (16, 512, 125, 8),
    "cosmos25": (16, 256, 29, 8),
}
# Half of the draws are valid for some family, so that both outcomes occur.
SIDES = st.one_of(st.integers(-32, 700), st.integers(1, 16).map(lambda n: 32 * n))
FRAMES = st.one_of(st.integers(-4, 140), st.integers(0, 7).map(lambda k: 4 * k + 1))
SIZE_ERROR = r"must be a multiple of|num_frames must be (1|4 \* k \+ 1)"
EXPERTS = {"sd3": 1, "wan21": 1, "wan22": 2, "cosmos25": 1}
# Step counts of the compared sigma grids. Qwen-Image's scheduler returns NaN for one step.
GRIDS = {"flux2": (1, 4, 8, 50), "flux_kontext": (1, 4, 10), "qwen_image": (2, 4, 10), "z_image": (1, 4, 10)}


def draw_noise(model, family):
    return draw_cpu_normal([1, 2], model.latent_shape(*CASES[family].size))


@each_family(FLOAT_TIMES)
def test_the_network_gets_its_time_as_an_unrounded_float(load, family):
    model = load(family)
    with record_calls(model.denoiser) as calls, torch.no_grad():
        model.denoise(draw_noise(model, family), torch.tensor([1.0, 0.12345]), model.encode_text(PROMPTS))
    assert calls[0]["timestep"].dtype == torch.float32
    torch.testing.assert_close(calls[0]["timestep"], torch.tensor([1000.0, 123.45]))


@each_family(SIZES)
@given(height=SIDES, width=SIDES, num_frames=FRAMES)
@settings(max_examples=100, deadline=None)
def test_exactly_the_sizes_that_the_network_takes_have_a_shape(load, family, height, width, num_frames):
    model, (multiple, largest, most_frames, factor) = load(family), SIZES[family]
    if most_frames == 1 and num_frames % 3:
        num_frames = 1
    fits = all(size % multiple == 0 and 0 < size <= largest for size in (height, width))
    if fits and 1 <= num_frames <= most_frames and num_frames % 4 == 1:
        frames = ((num_frames + 3) // 4,) if model.is_video else ()
        shape = model.latent_shape(height, width, num_frames)
        assert shape == (4, *frames, height // factor, width // factor)
        assert model.num_tokens(shape) == math.prod(shape[1:]) // (1 if family == "sana" else 4)
    else:
        with pytest.raises(ValueError, match=SIZE_ERROR):
            model.latent_shape(height, width, num_frames)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("digits", (8, 8, 1)),
        ("wan21", (16, 16, 125)),
        pytest.param("cosmos25", (256, 256, 29), marks=pytest.mark.slow),
        pytest.param("sana_video", (32, 32, 1), marks=pytest.mark.slow),
    ],
)
def test_the_largest_size_runs_and_a_video_of_one_frame(load, family, size):
    model = load(family)
    latents = torch.randn(1, *model.latent_shape(*size))
    with torch.no_grad():
        assert model.denoise(latents, torch.ones(1), model.encode_text(PROMPTS[:1])).shape == latents.shape


@each_family(["z_image", "hunyuan_video15", "qwen_image_edit_plus", "ltx2"])
def test_the_network_reads_no_values_and_its_inputs_have_known_shapes(load, tiny_pipelines, family):
    """It runs on the meta device, so it never waits for a GPU, and memory can be estimated."""
    size, options = CASES[family].size, {"source_size": "stock"}
    if family == "qwen_image_edit_plus":
        options["inputs"] = ["source", "source_2"]
    meta = load_on_meta_device(tiny_pipelines(family), dtype=torch.float32, **options)
    loaded = load_tiny(tiny_pipelines(family), family, **options)
    shape, shapes = meta.latent_shape(*size), meta.text_shapes()
    assert shape == loaded.latent_shape(*size)
    assert shapes == loaded.text_shapes()
    assert meta.input_shapes(shape) == loaded.input_shapes(shape)
    assert meta.sound_rate == loaded.sound_rate
    if family == "ltx2":
        assert shapes == {name: tuple(rows.shape[1:]) for name, rows in loaded.encode_text([""]).items()}
    conditioning = {
        name: torch.ones(2, *of_one, dtype=torch.int64 if "mask" in name else torch.float32, device="meta")
        for name, of_one in (shapes | meta.input_shapes(shape)).items()
    }
    latents = torch.empty(2, *shape, device="meta")
    assert meta.denoise(latents, torch.ones(2, device="meta"), conditioning).shape == latents.shape


@each_family(EXPERTS)
def test_a_missing_expert_is_refused(load, family):
    model, count = load(family), EXPERTS[family]
    arguments = draw_noise(model, family), torch.ones(2), model.encode_text(PROMPTS)
    with torch.no_grad():
        assert torch.equal(model.denoise(*arguments, expert=0), model.denoise(*arguments))
    with pytest.raises(ValueError, match=f"expert {count}|experts 0 to {count - 1}, got {count}"):
        model.denoise(*arguments, expert=count)


@each_family(GRIDS)
def test_the_grid_is_the_stock_pipeline_s(load, tiny_pipelines, family):
    model, pipeline = load(family), load_reference_pipeline(tiny_pipelines(family), CASES[family])
    call = model.pipeline_call_kwargs(1.0, 64, 96) | {"prompt": PROMPTS[:1], "output_type": "latent"}
    for num_steps in GRIDS[family]:
        pipeline(num_inference_steps=num_steps, **call)
        assert torch.equal(model.sigmas(num_steps, model.latent_shape(64, 96)), pipeline.scheduler.sigmas.double())


def test_a_shift_by_resolution_follows_the_pipeline(tiny_pipelines):
    model = load_tiny(tiny_pipelines("sd3"), "sd3")
    pipeline = load_reference_pipeline(tiny_pipelines("sd3"), CASES["sd3"])
    for holder in (model.pipeline, pipeline):
        holder.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=16)
    grids = []
    for height, width in [(32, 32), (64, 32)]:
        call = model.pipeline_call_kwargs(1.0, height, width)
        pipeline(PROMPTS, num_inference_steps=4, output_type="latent", **call)
        grids.append(model.sigmas(4, model.latent_shape(height, width)))
        torch.testing.assert_close(grids[-1], pipeline.scheduler.sigmas.double(), rtol=0, atol=0)
    assert not torch.equal(*grids)


# Behavior of diffusers: if this test fails, diffusers has changed; then remove its row from docs/models/.


@pytest.mark.slow
@check_each("family", ["flux2", "flux_kontext", "qwen_image"])
def test_the_network_rounds_the_time_to_the_compute_dtype(tiny_pipelines, family):
    low = registry.load_model(tiny_pipelines(family), dtype=torch.bfloat16, device="cpu")
    noise = torch.randn(1, *low.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    text = low.encode_text(PROMPTS[:1])
    with torch.no_grad():
        one, other = (low.denoise(noise, torch.tensor([sigma]), text) for sigma in (0.899, 0.900))
    assert torch.equal(one, other)
