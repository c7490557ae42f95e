"""Tests specific to FLUX.2-klein and FLUX.2-dev; test_families.py has the tests that all families share."""

import inspect
import json

import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline

from families import CASES, EXACT, PROMPTS, change_json, copy_pipeline, load_reference_pipeline, load_tiny
from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.cli.generate import parser
from wfm_ds.cli.samplers import load_sampler
from wfm_ds.errors import ModelError
from wfm_ds.models import registry
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.runs.model_loading import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(load):
    return load("flux2")


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines("flux2"), CASES["flux2"])


def test_a_distilled_pipeline_refuses_guidance(tiny_pipelines):
    distilled = load_tiny(tiny_pipelines("flux2"), "flux2")
    distilled.pipeline.register_to_config(is_distilled=True)
    distilled.check_sampling(SamplingRecipe(height=32, width=32, guidance_scale=1.0))
    with pytest.raises(ModelError, match=r"is distilled and ignores guidance; set sampling\.guidance_scale: 1"):
        distilled.check_sampling(SamplingRecipe(height=32, width=32, guidance_scale=4.0))


# FLUX.2-dev: embedded guidance and the Mistral3 text encoder


@pytest.fixture
def folder(tiny_pipelines, tmp_path):
    """Return a writable copy of the tiny pipeline."""
    return copy_pipeline(tiny_pipelines("flux2_dev"), tmp_path / "pipeline")


def load_dev(folder, **options):
    return load_tiny(folder, "flux2_dev", **options)


@pytest.mark.parametrize("family", ["flux2", "sd3"])
@pytest.mark.parametrize(
    "loaded", [load_dev, lambda path, **more: load_on_meta_device(path, dtype=torch.float32, **more)]
)
def test_networks_without_embedded_guidance_refuse_it(family, loaded, tiny_pipelines):
    sentence = f"this {family} network does not support embedded guidance; remove model.embedded_guidance"
    with pytest.raises(ModelError, match=sentence):
        loaded(tiny_pipelines(family), embedded_guidance=3.5)


def test_classifier_free_guidance_is_refused(tiny_pipelines):
    model = load_dev(tiny_pipelines("flux2_dev"))
    model.check_sampling(SamplingRecipe(height=32, width=32))
    with pytest.raises(ModelError, match=r"set sampling\.guidance_scale: 1 and model\.embedded_guidance"):
        model.check_sampling(SamplingRecipe(height=32, width=32, guidance_scale=3.5))
    with pytest.raises(ModelError, match=r"w must be 1, got 3\.5"):
        model.pipeline_call_kwargs(3.5, 32, 32)


def test_a_run_and_generate_pass_the_requested_guidance(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    recipe = recipe_file.load_recipe(root / "tests/recipes/flux2_dev_nft.yaml", ["model.embedded_guidance=1.5"])
    assert load_model(recipe, torch.device("cpu")).embedded_guidance == 1.5
    asked = ["--model", "tiny:flux2_dev", "--prompts", "p.txt", "--out", "out", "--height", "32", "--width", "32"]
    args = parser().parse_args([*asked, "--embedded-guidance", "1.5"])
    folder = registry.resolve_pipeline("tiny:flux2_dev")
    fill_from_call(args, "tiny:flux2_dev", folder, [folder])
    assert load_sampler(args).model.embedded_guidance == 1.5


def test_the_tokenizer_of_a_processor_is_read_without_its_images(folder, tiny_pipelines):
    """The released pipeline has a PixtralProcessor, which needs torchvision."""
    change_json(folder / "model_index.json", tokenizer=["transformers", "PixtralProcessor"])
    config = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
    (folder / "tokenizer" / "processor_config.json").write_text(json.dumps(config))
    found, want = (load_dev(path).encode_text(PROMPTS) for path in (folder, tiny_pipelines("flux2_dev")))
    assert torch.equal(found["prompt_embeds"], want["prompt_embeds"])
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ModelError, match=r"tokenizer cannot be loaded .*copy or download the pipeline again"):
        load_dev(folder)


# Behavior of diffusers: if one of these fails, diffusers has changed; then remove its row from docs/models/flux2.md.


def test_the_stock_call_takes_no_negative_prompt():
    assert "negative_prompt" not in inspect.signature(Flux2KleinPipeline.__call__).parameters


def test_the_stock_call_returns_latents_that_its_own_loop_cannot_take_back(pipeline):
    call = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 8, "output_type": "latent"}
    latents = pipeline(prompt=PROMPTS[:1], **call).images
    assert latents.shape == (1, 4, 16, 16)  # but `latents` must be [1, 16, 8, 8]
    with pytest.raises(RuntimeError):
        pipeline(prompt=PROMPTS[:1], latents=latents, **call)


def test_the_vae_s_statistics_are_its_batch_norm_s(model):
    assert isinstance(model.pipeline.vae, AutoencoderKLFlux2)
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    z = model.pipeline._encode_vae_image(2 * pixels - 1, None)
    torch.testing.assert_close(model.encode_pixels(pixels), z, **EXACT)
