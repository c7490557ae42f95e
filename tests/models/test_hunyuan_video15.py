"""HunyuanVideo-1.5: texts of different lengths, quoted texts, a guider in the pipeline, and tiles of the VAE."""

import json

import pytest
import torch

import families
from each_case import check_each
from families import (
    CASES,
    EXACT,
    change_json,
    copy_pipeline,
    create_prompts,
    load_reference_pipeline,
    load_tiny,
    sample_latents,
)
from wfm_ds.cli import generate
from wfm_ds.cli.call_defaults import fill_from_call
from wfm_ds.cli.init.model_summary import read_pipeline
from wfm_ds.contract.denoiser_checks import add_random_adapter
from wfm_ds.contract.export_checks import ExportSource
from wfm_ds.errors import ModelError
from wfm_ds.export.loading_code import loading_lines
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weights import export_weights
from wfm_ds.models.assets.few_steps import read_few_steps
from wfm_ds.models.assets.loading import read_call_defaults
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.hunyuan_video15 import EMBEDS, GLYPH_MASK, GLYPHS, MASK, HunyuanVideo15
from wfm_ds.storage.tensor_store import TensorStore
from wfm_ds.types import Prompt

pytestmark = pytest.mark.slow

FAMILY, SIZE, STEPS, SEEDS = "hunyuan_video15", (32, 48, 5), 4, [3, 4]
QUOTED, PLAIN = 'a white square with the text "hello" and the text “7”', "a red circle"
TEXTS = [QUOTED, PLAIN, ""]


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines(FAMILY), FAMILY)


@pytest.fixture
def pipeline(tiny_pipelines):
    return load_reference_pipeline(tiny_pipelines(FAMILY), CASES[FAMILY])


def make_sampler(model, **settings):
    return families.make_sampler(model, SIZE, eval_steps=STEPS, **settings)


@check_each("guidance", [1.0, 6.0])
def test_a_batch_equals_single_calls_of_the_diffusers_pipeline(model, pipeline, guidance):
    """With the pipeline's own scheduler and noise. The second prompt has a negative prompt with a quoted text."""
    sampler = make_sampler(model, guidance_scale=guidance)
    negative = ["", 'a video saying "cat"']
    prompts = [Prompt(id=t, text=t, negative_text=n) for t, n in zip([QUOTED, PLAIN], negative, strict=True)]
    latents = sample_latents(sampler, prompts, SEEDS)
    pixels = model.decode_latents(latents)
    assert sampler.forward.counts == {"sample": STEPS * (1 if guidance == 1 else 2)}
    pipeline.guider = pipeline.guider.from_config(model.guider_config(guidance))
    for i, prompt in enumerate(prompts):
        call = model.pipeline_call_kwargs(guidance, *SIZE) | {"num_inference_steps": STEPS, "prompt": prompt.text}

        def run(output_type, call=call, i=i):
            generator = torch.Generator().manual_seed(SEEDS[i])
            return pipeline(**call, negative_prompt=negative[i], output_type=output_type, generator=generator).frames

        torch.testing.assert_close(latents[i : i + 1], run("latent"), **EXACT)
        torch.testing.assert_close(pixels[i : i + 1], run("pt").movedim(2, 1), **EXACT)
    assert latents.std() > 0.1
    assert (pixels[0] - pixels[1]).abs().max() > 0.01


def test_padding_has_no_effect_on_velocities_and_gradients(tiny_pipelines):
    """In float64, so that only padding could cause a difference."""
    model = load_tiny(tiny_pipelines(FAMILY), FAMILY)
    model.dtype = torch.float64
    model.denoiser.double().requires_grad_(True)
    noise = model.draw_noise([1, 2, 3], model.latent_shape(*SIZE))
    sigma = torch.tensor([1.0, 0.4, 0.1])

    def run(rows, texts):
        model.denoiser.zero_grad(set_to_none=True)
        velocity = model.denoise(noise[rows], sigma[rows], model.encode_text(texts))
        torch.autograd.backward(velocity.double().square().sum())
        gradients = {n: p.grad.clone() for n, p in model.denoiser.named_parameters() if p.grad is not None}
        return velocity.detach(), gradients

    together, gradients = run(slice(0, 3), TEXTS)
    alone = [run(slice(i, i + 1), TEXTS[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat([velocity for velocity, _ in alone]), rtol=0, atol=1e-6)
    for name, gradient in gradients.items():
        total = sum(of_one.get(name, torch.zeros(())) for _, of_one in alone)
        torch.testing.assert_close(gradient, total, rtol=1e-6, atol=1e-6)


def test_texts_have_the_embeddings_of_the_pipeline_without_padding_and_are_stored(model, pipeline, tmp_path):
    embeds, mask, glyphs, glyph_mask = pipeline.encode_prompt(TEXTS, batch_size=3)
    rows = [model.encode_text([text]) for text in TEXTS]
    for i, row in enumerate(rows):
        assert row[MASK].all()
        assert row[GLYPH_MASK].all()
        torch.testing.assert_close(row[EMBEDS][0], embeds[i, : int(mask[i].sum())], **EXACT)
        torch.testing.assert_close(row[GLYPHS][0], glyphs[i, : int(glyph_mask[i].sum())], **EXACT)
    assert [row[GLYPHS].shape[1] for row in rows] == [len('Text "hello". Text "7". ') + 1, 0, 0]  # bytes and </s>
    assert rows[0][EMBEDS].shape[1] > rows[1][EMBEDS].shape[1]
    shapes = model.text_shapes()
    assert all(tuple(tensor.shape[2:]) == shapes[name][1:] for name, tensor in rows[0].items())
    assert (shapes[EMBEDS][0], shapes[GLYPHS][0]) == (embeds.shape[1], glyphs.shape[1])
    TextCache(model, store=TensorStore(tmp_path)).encode(TEXTS)
    stored = TextCache(model, store=TensorStore(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "encode_text", None)  # must not be called
        found, single = stored.encode(TEXTS), stored.encode([PLAIN])
    want = model.stack_conditioning(rows)
    assert found.keys() == want.keys() == model.conditioning_keys
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert all(torch.equal(single[name], tensor) for name, tensor in rows[1].items())


@check_each(
    ("size", "want"),
    [((480, 848, 121), (4, 31, 30, 53)), ((16, 16, 1), (4, 1, 1, 1)), ((32, 48, 4), None), ((32, 40, 5), None)],
)
def test_sizes(model, size, want):
    if want is None:
        with pytest.raises(ValueError, match=r"num_frames must be 4 \* k \+ 1|width must be a multiple of 16"):
            model.latent_shape(*size)
    else:
        assert model.latent_shape(*size) == want
        assert model.num_tokens(want) == want[1] * want[2] * want[3]


def test_large_videos_are_encoded_and_decoded_in_tiles_as_with_diffusers(model, pipeline):
    """As in the example of diffusers, which calls vae.enable_tiling()."""
    pixels = torch.rand(2, 3, 5, 32, 272, generator=torch.Generator().manual_seed(0))
    vae, scale = pipeline.vae, pipeline.vae.config.scaling_factor
    with torch.no_grad():
        latents = model.encode_pixels(pixels)
        whole = vae.encode(2 * pixels[:1] - 1).latent_dist.mode() * scale
        vae.enable_tiling()
        for i in range(2):
            z = vae.encode(2 * pixels[i : i + 1] - 1).latent_dist.mode()
            torch.testing.assert_close(latents[i : i + 1], z * scale, **EXACT)
            video = (vae.decode(z, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
            torch.testing.assert_close(model.decode_latents(latents)[i : i + 1], video, **EXACT)
    assert (whole - latents[:1]).abs().max() > 1e-3


def test_other_input_channels_are_refused(tiny_pipelines, pipeline, tmp_path):
    folder = copy_pipeline(tiny_pipelines(FAMILY), tmp_path / "pipeline")
    network = type(pipeline.transformer).from_config({**pipeline.transformer.config, "in_channels": 8})
    network.save_pretrained(folder / "transformer")
    with pytest.raises(ModelError, match="a network with 8 input channels is not supported, only 9"):
        load_tiny(folder, FAMILY)


def test_the_guidance_scale_comes_from_the_guider(tiny_pipelines, tmp_path):
    folder = copy_pipeline(tiny_pipelines(FAMILY), tmp_path / "pipeline")
    (folder / "call.json").unlink()
    found = read_pipeline(str(folder))
    assert (found.height, found.width, found.num_frames, found.guidance_scale) == (640, 640, 121, 6.0)
    words = ["--model", "m", "--prompts", "p.txt", "--out", "o", "--height", "32", "--width", "32", "--frames", "5"]
    args = generate.parser().parse_args(words)
    fill_from_call(args, "m", folder, [folder])
    assert (args.guidance, args.steps) == (6.0, 40)
    change_json(folder / "guider" / "guider_config.json", enabled=False)
    assert read_pipeline(str(folder)).guidance_scale == 1.0


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_few_step_lora_loads_in_diffusers_with_its_guidance(tiny_pipelines, tmp_path, guidance):
    model = load_tiny(tiny_pipelines(FAMILY), FAMILY)
    sampler = make_sampler(model, eval_grid="even", guidance_scale=guidance)
    target = ExportTarget.from_model(model, sampler.settings)
    assert ExportTarget.from_json(json.loads(json.dumps(target.to_json()))) == target  # as in a checkpoint
    add_random_adapter(model, b_std=0.3)
    options = {"policy": "train", "dtype": torch.float32, "is_main": True}
    folder = export_weights(target, ExportSource(model, uses_lora=True), tmp_path / "step_3", **options)
    index = json.loads((model.path / "model_index.json").read_text())
    assert read_few_steps(folder, HunyuanVideo15, index) == (STEPS if guidance == 1 else None)
    assert read_call_defaults(folder)["guidance_scale"] == guidance
    names = {}
    exec(loading_lines(model.path, folder, lora=True), names)  # the loading code shown to users
    pipe = names["pipe"]
    pipe.set_progress_bar_config(disable=True)
    call = json.loads((folder / "call.json").read_text()) | {"prompt": QUOTED, "output_type": "latent"}
    got = pipe(**call, generator=torch.Generator("cpu").manual_seed(11)).frames
    torch.testing.assert_close(got, sample_latents(sampler, create_prompts(QUOTED), [11]), **EXACT)


# Behavior of diffusers: if one of these tests fails, diffusers has changed; then remove the workaround.


def test_the_diffusers_pipeline_has_no_loader_of_adapters(pipeline):
    assert not hasattr(pipeline, "load_lora_weights")
    assert hasattr(pipeline.transformer, "load_lora_adapter")


def test_the_vae_of_diffusers_fails_for_several_videos(pipeline):
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        pipeline.vae.decode(torch.zeros(2, 4, 2, 2, 2))
