"""Tests specific to Qwen-Image-Edit; test_families.py has the tests that all families share."""

import gc
import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from each_case import check_each
from families import (
    CASES,
    EXACT,
    change_json,
    copy_pipeline,
    load_reference_pipeline,
    load_tiny,
    make_sampler,
    run_reference_pipeline,
    sample_latents,
)
from wfm_ds.errors import ModelError
from wfm_ds.models.assets.text_cache import EmbeddingLru
from wfm_ds.models.base import TextWithImages
from wfm_ds.models.qwen_image import EMBEDS, MASK, unpack_latents
from wfm_ds.models.qwen_image_edit import edit, edit_plus
from wfm_ds.types import SOURCES, Prompt

pytestmark = pytest.mark.slow

EDIT, PLUS = "qwen_image_edit", "qwen_image_edit_plus"
HEIGHT, WIDTH, SOURCE_SIZE = 32, 48, (32, 64)  # sources in the pipeline's size, which is not the size of the sample
TEXTS = ("a red circle", "the digit 7 in a blue square")
SEEDS = (3, 4)


def create_prompts(names):
    draws = np.random.default_rng(0)
    return [
        Prompt(
            id=text, text=text, inputs={name: draws.integers(256, size=(*SOURCE_SIZE, 3), dtype="u1") for name in names}
        )
        for text in TEXTS
    ]


def run_diffusers(folder, family, prompts, grid):
    """Return the latents that the diffusers pipeline generates with guidance, one call per prompt."""
    images = [[Image.fromarray(image) for image in prompt.inputs.values()] for prompt in prompts]
    pipeline = load_reference_pipeline(folder, CASES[family])
    tokens = run_reference_pipeline(
        pipeline,
        CASES[family],
        grid,
        prompt=list(TEXTS),
        negative_prompt=" ",
        image=images if family == PLUS else [image for (image,) in images],
        true_cfg_scale=4.0,
        height=HEIGHT,
        width=WIDTH,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
    )
    return unpack_latents(tokens, HEIGHT // 8, WIDTH // 8)


@check_each(
    ("family", "num_sources", "zero_cond_t"),
    [(EDIT, 1, False), (PLUS, 1, True), (PLUS, 2, True), (PLUS, 2, False), (PLUS, 3, True)],
)
def test_two_prompts_with_guidance_match_diffusers_and_single_samples(
    family, num_sources, zero_cond_t, tiny_pipelines, tmp_path
):
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipelines(family), folder)
    change_json(folder / "transformer" / "config.json", zero_cond_t=zero_cond_t)
    names = SOURCES[:num_sources]
    model = load_tiny(folder, family, inputs=names, source_size="stock")
    settings = {"eval_steps": 3, "guidance_scale": 4.0, "guidance_batch": "joint"}
    prompts, sampler = (
        create_prompts(names),
        make_sampler(model, (HEIGHT, WIDTH), max_joint_rows={"joint": 4}, **settings),
    )
    both, joint = (sample_latents(sampler, prompts, SEEDS, purpose) for purpose in ("separate", "joint"))
    alone = [sample_latents(sampler, [p], [seed], "one") for p, seed in zip(prompts, SEEDS, strict=True)]
    grid = model.evaluation_sigmas(sampler.settings)
    torch.testing.assert_close(both, run_diffusers(folder, family, prompts, grid), **EXACT)
    torch.testing.assert_close(both, joint, **EXACT)
    torch.testing.assert_close(both, torch.cat(alone), **EXACT)
    assert sampler.forward.counts == {"separate": 6, "joint": 3, "one": 12}


def test_the_text_cache_does_not_keep_images():
    """They would take more memory than the embeddings, and are not counted."""
    texts = [
        TextWithImages("a cat", negative, (np.full((4, 4, 3), i, np.uint8),)) for i in (0, 1) for negative in (0, 1)
    ]
    cache = EmbeddingLru(1 << 20)
    cache.put({text: {"prompt_embeds": torch.full((1, 2), i)} for i, text in enumerate(texts)})
    references = [weakref.ref(text.images[0]) for text in texts]
    again = [TextWithImages(text.text, text.negative, (text.images[0].copy(),)) for text in texts]
    del texts
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert [int(cache.get(text)["prompt_embeds"][0, 0]) for text in again] == [0, 1, 2, 3]


def test_the_released_sizes_determine_tokens_and_time_shift(tiny_pipelines, monkeypatch):
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", 1024 * 1024)
    plain = load_tiny(tiny_pipelines("qwen_image"), "qwen_image")
    shape = plain.latent_shape(512, 768)
    for size, side in (("target", (512, 768)), ("stock", (832, 1248)), ((256, 256), (256, 256))):
        model = load_tiny(tiny_pipelines(PLUS), PLUS, inputs=["source", "source_2"], source_size=size)
        assert model.source_image_size(512, 768) == side
        assert model.input_shapes(shape)["source_2"] == (4, side[0] // 8, side[1] // 8)
        assert model.num_tokens(shape) == (512 * 768 + 2 * side[0] * side[1]) // 256
        assert model.schedule_arguments(shape, 4)["mu"] == plain.schedule_arguments(shape, 4)["mu"]
        assert model.text_shapes()[MASK] == (64 + 2 * 14 * 14,)  # 384 x 384 pixels, 28 x 28 per token


def test_the_text_encoder_sees_the_image_that_the_pipeline_would_make(tiny_pipelines, monkeypatch):
    """Sources of 48 x 48 pixels become about 64 x 64 for the text encoder, except in the stock size of Edit."""
    image = np.random.default_rng(1).integers(256, size=(48, 48, 3), dtype="u1")
    monkeypatch.setattr(edit_plus, "CONDITION_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(edit, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    for family, source_size, side in ((PLUS, "target", 64), (EDIT, "target", 64), (EDIT, "stock", 48)):
        model = load_tiny(tiny_pipelines(family), family, inputs=["source"], source_size=source_size)
        (text,) = model.attach_images([TEXTS[0]], [{"source": image}])
        seen = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
        want, _ = model.pipeline.encode_prompt(TEXTS[0], [seen], device="cpu")
        got = model.encode_text_with_images(text)
        assert torch.equal(got[EMBEDS], want)
        assert bool(got[MASK].all())


def test_the_processor_loads_without_torchvision_from_the_files_of_released_pipelines(tiny_pipelines, tmp_path):
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_pipelines(EDIT), folder)
    file = folder / "processor" / "processor_config.json"
    images = json.loads(file.read_text())["image_processor"]
    stored = {**images, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2VLProcessor"}
    (file.parent / "preprocessor_config.json").write_text(json.dumps(stored))
    file.unlink()
    released, tiny = (load_tiny(path, EDIT, inputs=["source"]) for path in (folder, tiny_pipelines(EDIT)))
    (text,) = tiny.attach_images([TEXTS[0]], [create_prompts(["source"])[0].inputs])
    assert torch.equal(released.encode_text_with_images(text)[EMBEDS], tiny.encode_text_with_images(text)[EMBEDS])
    assert "processor" in tiny.text_folders()  # its files are part of the key of the text cache


def test_missing_images_and_a_damaged_processor_raise_one_sentence(tiny_pipelines, tmp_path):
    model = load_tiny(tiny_pipelines(EDIT), EDIT, inputs=["source"])
    with pytest.raises(ValueError, match="encodes each prompt together with its source images"):
        model.encode_text(["a red circle"])
    text = {EMBEDS: torch.zeros(1, 3, 32), MASK: torch.ones(1, 3)}
    with pytest.raises(ValueError, match="needs a source image: conditioning must hold source"):
        model.denoise(torch.zeros(1, *model.latent_shape(32, 48)), torch.ones(1), text)
    folder = copy_pipeline(tiny_pipelines(EDIT), tmp_path / "pipeline")
    (folder / "processor/processor_config.json").write_text("{}")
    with pytest.raises(ModelError, match="processor cannot be loaded"):
        load_tiny(folder, EDIT)
