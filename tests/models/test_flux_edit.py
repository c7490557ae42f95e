"""Images as inputs of FLUX.2 and FLUX.1-Kontext; test_families.py has the tests that all families share."""

import json

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image

from each_case import check_each
from families import (
    CASES,
    EXACT,
    PROMPTS,
    change_json,
    copy_pipeline,
    load_reference_pipeline,
    load_tiny,
    make_sampler,
    sample_latents,
)
from wfm_ds.contract.denoiser_checks import add_random_adapter
from wfm_ds.contract.export_checks import export_model
from wfm_ds.errors import ModelError
from wfm_ds.export.target import ExportTarget
from wfm_ds.types import SOURCES, Prompt

pytestmark = pytest.mark.slow

SIZE = (64, 96)  # FLUX.2's pipelines refuse images with fewer than 64 pixels per side
SEEDS = (3, 4)
FAMILIES = ("flux2", "flux2_dev", "flux_kontext")


def draw_sources(count, size=SIZE):
    """Return {input name: image} with `count` sources for each of two samples. Those of the second are brighter."""
    draws = np.random.default_rng(count)
    return [{name: draws.integers(low, low + 80, (*size, 3), np.uint8) for name in SOURCES[:count]} for low in (0, 176)]


def sample_images(model, rows, w, size=SIZE):
    """Sample an image [3,H,W] for each prompt and row of inputs, in one batch."""
    prompts = [Prompt(id=text, text=text, inputs=row) for text, row in zip(PROMPTS, rows, strict=True)]
    sampler = make_sampler(model, size, eval_steps=3, guidance_scale=w)
    return model.decode_latents(sample_latents(sampler, prompts, SEEDS))


def reference_images(pipeline, model, rows, w, size=SIZE):
    """Return the images of the diffusers pipeline, one by one."""
    images = []
    for text, seed, row in zip(PROMPTS, SEEDS, rows, strict=True):
        pictures = [Image.fromarray(image) for image in row.values()]
        if model.family == "flux_kontext":
            pictures = pictures[0] if pictures else None
        call = model.pipeline_call_kwargs(w, *size)
        noise = torch.Generator().manual_seed(seed)
        output = pipeline(
            image=pictures or None, prompt=text, num_inference_steps=3, generator=noise, output_type="pt", **call
        )
        images.append(output.images)
    return torch.cat(images)


@check_each(
    ("family", "count", "w"),
    [
        *(("flux2", 0, 4.0), ("flux2", 1, 1.0), ("flux2", 1, 4.0), ("flux2", 2, 4.0), ("flux2_dev", 1, 1.0)),
        *(("flux_kontext", 0, 1.0), ("flux_kontext", 0, 3.0), ("flux_kontext", 1, 1.0), ("flux_kontext", 1, 3.0)),
    ],
)
def test_a_batch_with_different_sources_equals_single_images_of_diffusers(family, count, w, tiny_pipelines):
    model = load_tiny(tiny_pipelines(family), family, inputs=SOURCES[:count])
    pipeline = load_reference_pipeline(tiny_pipelines(family), CASES[family])
    rows = draw_sources(count)
    images = sample_images(model, rows, w)
    torch.testing.assert_close(images, reference_images(pipeline, model, rows, w), **EXACT)
    if count:
        assert (images - sample_images(model, rows[::-1], w)).abs().amax((1, 2, 3)).min() > 1e-3


@check_each("family", FAMILIES)
def test_without_sources_the_network_gets_the_tokens_of_the_sample_alone(family, load, tiny_pipelines):
    plain, model = load(family), load_tiny(tiny_pipelines(family), family, inputs=["source"])
    shape = plain.latent_shape(*SIZE)
    arguments = torch.randn(2, *shape), torch.tensor([0.9, 0.3]), plain.encode_text(PROMPTS)
    with torch.no_grad():
        assert torch.equal(model.denoise(*arguments), plain.denoise(*arguments))
    assert torch.equal(model.sigmas(8, shape), plain.sigmas(8, shape))
    assert plain.num_tokens(shape) == SIZE[0] * SIZE[1] // 16
    assert plain.input_shapes(shape) == {}


@check_each(
    ("family", "source_size", "size"),
    [("flux2", "target", SIZE), ("flux2_dev", (32, 64), (32, 64)), ("flux_kontext", (32, 64), (32, 64))],
)
def test_tokens_of_sources_count_for_memory_but_not_for_the_shift(family, source_size, size, load, tiny_pipelines):
    names = list(load(family).input_specs)
    model = load_tiny(tiny_pipelines(family), family, inputs=names, source_size=source_size)
    shape = model.latent_shape(*SIZE)
    rows = draw_sources(len(names), size)
    inputs = model.encode_inputs(rows, 1, SIZE)
    assert {name: tuple(latents.shape[1:]) for name, latents in inputs.items()} == model.input_shapes(shape)
    first = model.encode_uint8([row["source"] for row in rows])
    torch.testing.assert_close(inputs["source"], first, **EXACT)
    assert model.num_tokens(shape) == load(family).num_tokens(shape) + len(names) * size[0] * size[1] // 16
    assert torch.equal(model.sigmas(8, shape), load(family).sigmas(8, shape))
    sample_images(model, rows, 1.0)


@check_each(("family", "lora"), [("flux2", False), ("flux_kontext", True)])
def test_diffusers_edits_with_an_export_as_the_trained_model_does(family, lora, tiny_pipelines, tmp_path):
    folder, rows = tiny_pipelines(family), draw_sources(1)
    model = load_tiny(folder, family, inputs=["source"])
    before = sample_images(model, rows, 2.0)
    if lora:
        add_random_adapter(model, b_std=0.3)
    else:
        with torch.no_grad():
            for weight in model.denoiser.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    out = export_model(tmp_path / f"{family}_{lora}", model, lora=lora)
    pipeline = load_reference_pipeline(folder if lora else out, CASES[family])
    if lora:
        pipeline.load_lora_weights(out, weight_name="model.safetensors")
    trained = sample_images(model, rows, 2.0)
    torch.testing.assert_close(reference_images(pipeline, model, rows, 2.0), trained, **EXACT)
    assert (trained - before).abs().max() > 1e-2


def test_klein_shrinks_large_sources_like_diffusers(load):
    model = load("flux2")
    for size in ((32, 48), (1024, 1024), (1024, 1028), (2048, 1024), (700, 1600)):
        width, height = Flux2ImageProcessor._resize_if_exceeds_area(Image.new("L", size[::-1])).size
        assert model.stock_source_size(*size) == (height // 4 * 4, width // 4 * 4)


def test_kontext_resizes_a_source_to_the_preferred_size_like_diffusers(tiny_pipelines, monkeypatch):
    sizes = [(48, 96), (64, 80), (96, 48)]  # width, height; the released sizes are too large for a test
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    folder, rows = tiny_pipelines("flux_kontext"), draw_sources(1)
    model = load_tiny(folder, "flux_kontext", inputs=["source"], source_size="stock")
    assert model.source_image_size(*SIZE) == (48, 96)
    assert model.source_image_size(*SIZE[::-1]) == (80, 64)
    resized = [np.array(Image.fromarray(row["source"]).resize((96, 48), Image.Resampling.LANCZOS)) for row in rows]
    images = sample_images(model, [{"source": image} for image in resized], 1.0)
    pipeline = load_reference_pipeline(folder, CASES["flux_kontext"])
    torch.testing.assert_close(images, reference_images(pipeline, model, rows, 1.0), **EXACT)


def test_a_source_size_that_the_network_cannot_use_is_refused(tiny_pipelines):
    odd = load_tiny(tiny_pipelines("flux_kontext"), "flux_kontext", inputs=["source"], source_size=(30, 32))
    with pytest.raises(ValueError, match=r"^height must be a multiple of 4, got 30$"):
        odd.encode_inputs(draw_sources(1, (30, 32)), 1, SIZE)


@check_each(("family", "default"), [("flux2_dev", 4.0), ("flux_kontext", 3.5)])
def test_the_guidance_is_the_recipe_s_or_that_of_the_folder_or_of_the_stock_call(
    family, default, tiny_pipelines, tmp_path
):
    folder = copy_pipeline(tiny_pipelines(family), tmp_path / "pipeline")
    stored = {"negative_prompt": ""} if family == "flux_kontext" else {}  # without it, the pipeline has no guidance

    def exported(**options):
        return ExportTarget.from_model(load_tiny(folder, family, **options)).call_arguments

    assert load_tiny(folder, family).embedded_guidance == 4.0
    assert exported() == {}
    asked = load_tiny(folder, family, embedded_guidance=2.5)
    assert asked.pipeline_call_kwargs(1.0, 32, 32)["guidance_scale"] == 2.5
    assert asked.text_cache_key() == load_tiny(folder, family).text_cache_key()  # cached texts fit any guidance
    change_json(folder / "call.json", guidance_scale=3)
    assert load_tiny(folder, family).embedded_guidance == 3.0
    for wrong in (0, "3"):
        change_json(folder / "call.json", guidance_scale=wrong)
        with pytest.raises(ModelError, match=rf"call\.json: guidance_scale must be a number above 0, got {wrong!r}"):
            load_tiny(folder, family)
    call = json.loads((folder / "call.json").read_text())
    (folder / "call.json").write_text(json.dumps({"max_sequence_length": call["max_sequence_length"]}))
    assert load_tiny(folder, family).embedded_guidance == default
    assert exported() == stored
    assert exported(embedded_guidance=2.5) == stored | {"guidance_scale": 2.5}
    if family == "flux_kontext":  # the pipeline resizes by default
        for size, resize in (("target", {"_auto_resize": False}), ("stock", {})):
            assert exported(inputs=["source"], source_size=size) == stored | resize


# Behavior of diffusers: if one of these fails, diffusers has changed; remove its row from docs/models/flux_kontext.md.


def test_the_stock_call_scales_images_to_its_area(tiny_pipelines):
    pipeline = load_reference_pipeline(tiny_pipelines("flux_kontext"), CASES["flux_kontext"])
    call = {"prompt": PROMPTS[0], "height": 32, "width": 32, "num_inference_steps": 1, "output_type": "pt"}
    assert pipeline(**call, max_area=64 * 64).images.shape[2:] == (64, 64)
