"""Tests specific to FLUX.2-dev: embedded guidance and the Mistral3 text encoder."""

import json

import pytest
import torch

from families import PROMPTS, change_json, copy_pipeline, load_tiny
from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.cli.generate import parser
from wfm_ds.cli.samplers import load_sampler
from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.models import registry
from wfm_ds.models.assets.meta_loading import load_on_meta_device
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.runs.model_loading import load_model

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tiny_pipelines, tmp_path):
    """Return a writable copy of the tiny pipeline."""
    return copy_pipeline(tiny_pipelines("flux2_dev"), tmp_path / "pipeline")


def load(folder, **options):
    return load_tiny(folder, "flux2_dev", **options)


DRAWN_ALONE = r"set sampling\.guidance_scale: 1 and model\.embedded_guidance"


def test_the_guidance_is_the_recipe_s_or_that_of_the_folder_or_of_the_stock_call(folder):
    assert load(folder).embedded_guidance == 4.0
    assert ExportTarget.from_model(load(folder)).call_arguments == {}
    asked = load(folder, embedded_guidance=2.5)
    assert asked.pipeline_call_kwargs(1.0, 32, 32)["guidance_scale"] == 2.5
    assert ExportTarget.from_model(asked).call_arguments == {"guidance_scale": 2.5}
    assert asked.text_cache_key() == load(folder).text_cache_key()  # cached texts are valid for any guidance
    change_json(folder / "call.json", guidance_scale=3)
    assert load(folder).embedded_guidance == 3.0
    change_json(folder / "call.json", guidance_scale=0)
    with pytest.raises(ModelError, match=r"call\.json: guidance_scale must be a number above 0, got 0"):
        load(folder)


@pytest.mark.parametrize("family", ["flux2", "sd3"])
@pytest.mark.parametrize("loaded", [load, lambda path, **more: load_on_meta_device(path, dtype=torch.float32, **more)])
def test_networks_without_embedded_guidance_refuse_it(family, loaded, tiny_pipelines):
    sentence = f"this {family} network does not support embedded guidance; remove model.embedded_guidance"
    with pytest.raises(ModelError, match=sentence):
        loaded(tiny_pipelines(family), embedded_guidance=3.5)


def test_classifier_free_guidance_is_refused(tiny_pipelines):
    model = load(tiny_pipelines("flux2_dev"))
    model.check_sampling(SamplingRecipe(height=32, width=32))
    with pytest.raises(ModelError, match=DRAWN_ALONE):
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
    found, want = (load(path).encode_text(PROMPTS) for path in (folder, tiny_pipelines("flux2_dev")))
    assert torch.equal(found["prompt_embeds"], want["prompt_embeds"])
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ModelError, match=r"tokenizer cannot be loaded .*copy or download the pipeline again"):
        load(folder)
