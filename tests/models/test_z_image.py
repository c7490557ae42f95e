"""What is particular to Z-Image; what holds for every family is in test_families.py."""

import json
import shutil

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel

from families import CASES, EXACT, PROMPTS, denoise_latents, load_reference_pipeline, run_reference_pipeline
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.z_image import EMBEDS, MASK
from wfm_ds.recipe.sampling import SamplingRecipe

pytestmark = pytest.mark.slow

SIZE = (32, 48, 1)
LONG = "a red circle on white and the digit 7 in a blue square on white and the digit 3 " * 2


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return registry.load_model(tiny_pipelines("z_image"), dtype=torch.float32, device="cpu")


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("z_image"), CASES["z_image"])


def call_of(pipeline, **more):
    """Latents of the stock call, of one noise, two prompts and two steps."""
    noise = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 2, "max_sequence_length": 64}
    return pipeline(list(PROMPTS), **size, generator=noise, output_type="latent", **more).images


@pytest.mark.parametrize("size", [SIZE, (64, 128, 1)])  # six tokens and padding, and 32 without any
def test_texts_on_both_sides_of_a_multiple_of_32_are_drawn_as_by_the_stock_pipeline(model, pipeline, size):
    """Where a picture's positions begin depends on its text's length."""
    prompts = [PROMPTS[0], LONG]
    shape = model.latent_shape(*size)
    grid = model.sigmas(3, shape)
    text = TextCache(model).encode(prompts)
    short, long = text[MASK].sum(1).tolist()
    assert short < 32 < long
    noise = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    want = run_reference_pipeline(
        pipeline, CASES["z_image"], grid, prompt=prompts, generator=noise, **model.pipeline_call_kwargs(4.0, *size)
    )
    noise = torch.cat([torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    uncond = model.encode_negative_text([""] * 2)
    got = denoise_latents(model, noise, text, grid, solver="ode", guidance_scale=4.0, uncond=uncond)
    torch.testing.assert_close(got, want, **EXACT)


def test_the_network_is_the_stock_one_with_another_forward(model, pipeline):
    assert isinstance(model.denoiser, ZImageTransformer2DModel)
    assert model.denoiser.state_dict().keys() == pipeline.transformer.state_dict().keys()


def test_nothing_is_read_from_the_device(model):
    """On the meta device there are no values to read."""
    network = registry.load_model(model.path, dtype=torch.float32, device="cpu").denoiser.to("meta")
    text = {name: tensor.to("meta") for name, tensor in model.encode_text(PROMPTS).items()}
    noise = torch.empty(2, *model.latent_shape(*SIZE), device="meta")
    out = network(noise, torch.empty(2, device="meta"), text[EMBEDS], text[MASK])[0]
    assert out.shape == noise.shape


@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_the_grid_is_the_stock_pipeline_s(model, pipeline, num_steps):
    call_of(pipeline, guidance_scale=0.0)
    size = {"height": 32, "width": 48, "num_inference_steps": num_steps, "output_type": "latent"}
    pipeline(PROMPTS[:1], **size, guidance_scale=0.0, max_sequence_length=64)
    assert torch.equal(model.sigmas(num_steps, model.latent_shape(*SIZE)), pipeline.scheduler.sigmas.double())
    assert model.flow_shift(SamplingRecipe(height=32, width=48)) == 6.0


@pytest.mark.parametrize(
    ("change", "says"),
    [({"siglip_feat_dim": 8}, "with image inputs"), ({"all_patch_size": [2, 4]}, "with patches")],
)
def test_a_network_of_another_kind_is_refused(tiny_pipelines, tmp_path, change, says):
    folder = tmp_path / "other"
    shutil.copytree(tiny_pipelines("z_image"), folder)
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=says):
        registry.load_model(folder, dtype=torch.float32, device="cpu")


# Behavior of diffusers: if one of these fails, diffusers has changed; then remove its row from docs/models/z_image.md.


def test_the_stock_pipeline_writes_its_template_into_the_caller_s_list(pipeline):
    prompts = list(PROMPTS)
    pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=64)
    assert all(written != prompt and prompt in written for written, prompt in zip(prompts, PROMPTS, strict=True))


def test_the_stock_pipeline_tells_a_shift_to_schedulers_that_have_one(pipeline):
    told = []

    class Noting(FlowMatchEulerDiscreteScheduler):
        def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
            told.append(mu)
            super().set_timesteps(sigmas=sigmas, device=device)

    pipeline.scheduler = Noting(shift=6.0)
    call_of(pipeline, guidance_scale=0.0)
    assert told[0] is not None
    assert not pipeline.scheduler.config.use_dynamic_shifting


def test_the_stock_guidance_is_one_less_than_w_and_on_below_1(pipeline):
    off, on = (call_of(pipeline, guidance_scale=g) for g in (0.0, 0.5))
    assert (off - on).abs().max() > 1e-3


def test_the_stock_pipeline_normalises_and_truncates_guidance_when_asked_alone(pipeline):
    plain = call_of(pipeline, guidance_scale=4.0)
    assert torch.equal(plain, call_of(pipeline, guidance_scale=4.0, cfg_truncation=1.0, cfg_normalization=False))
    # `True` is a factor of 1, and the norm is that of a whole picture.
    assert torch.equal(
        call_of(pipeline, guidance_scale=4.0, cfg_normalization=True),
        call_of(pipeline, guidance_scale=4.0, cfg_normalization=1.0),
    )
    for change in ({"cfg_normalization": True}, {"cfg_truncation": 0.1}):
        assert (plain - call_of(pipeline, guidance_scale=4.0, **change)).abs().max() > 1e-3
