"""First-frame conditioning of Wan's image-to-video networks, compared with the stock pipeline; rejected inputs.

test_families.py compares samples with the stock pipeline, one prompt at a time.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from clips import write_clip
from families import CASES, EXACT, PROMPTS, denoise_latents, load_reference_pipeline, run_reference_pipeline
from wfm_ds.data.inputs import load_first_frame
from wfm_ds.data.media import load_media
from wfm_ds.data.pixels import Framing
from wfm_ds.data.samples import LocalFile
from wfm_ds.engine.adapter_layers import match_linear_layers
from wfm_ds.models import vae
from wfm_ds.models.wan import CHANNELS_KEY, EMBEDS_KEY, ImageConditioner
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.types import FIRST_FRAME

pytestmark = pytest.mark.slow

HEIGHT, WIDTH, FRAMES = SIZE = (32, 48, 9)
FAMILIES = ("wan21_i2v", "wan22_i2v")


@pytest.fixture(scope="module")
def pictures():
    return list(np.random.default_rng(1).integers(0, 256, (2, HEIGHT, WIDTH, 3)).astype(np.uint8))


def told(model, pictures, num_frames=FRAMES):
    inputs = [{FIRST_FRAME: picture.astype(np.float32)} for picture in pictures]
    return model.encode_inputs(inputs, num_frames, (HEIGHT, WIDTH))


# Against the stock pipeline


@pytest.mark.parametrize("family", FAMILIES)
def test_the_condition_equals_the_stock_pipelines(load, tiny_pipelines, pictures, family):
    model, pipeline = load(family), load_reference_pipeline(tiny_pipelines(family), CASES[family])
    got = told(model, pictures)
    for i, picture in enumerate(pictures):
        image = pipeline.video_processor.preprocess(Image.fromarray(picture), height=HEIGHT, width=WIDTH)
        _, want = pipeline.prepare_latents(image, 1, 4, *SIZE, dtype=torch.float32, device=torch.device("cpu"))
        assert torch.equal(got[CHANNELS_KEY][i : i + 1], want)
        if family == "wan21_i2v":
            want = pipeline.encode_image(Image.fromarray(picture), torch.device("cpu"))
            torch.testing.assert_close(got[EMBEDS_KEY][i : i + 1], want, **EXACT)
    assert {name: tuple(tensor.shape[1:]) for name, tensor in got.items()} == model.input_shapes(
        model.latent_shape(*SIZE)
    )


def test_a_first_frame_decoded_alone_equals_the_clips(load, tmp_path):
    """A first frame decoded alone equals the clip's, also in latents: conditioning and training target agree."""
    pixels = np.random.default_rng(2).integers(0, 256, (30, 8, 12, 3), np.uint8).repeat(4, 1).repeat(4, 2)
    write_clip(tmp_path / "a.mp4", size=(HEIGHT, WIDTH), pictures=pixels)
    framing = Framing(height=HEIGHT, width=WIDTH, num_frames=FRAMES)
    for u in (0.1, 0.8):
        clip = load_media(LocalFile(str(tmp_path / "a.mp4")), framing, lambda purpose, u=u: u)
        alone = load_first_frame(LocalFile(str(tmp_path / "a.mp4")), framing, lambda purpose, u=u: u)
        assert np.array_equal(alone, clip[0])
        model = load("wan22_i2v")
        condition = told(model, [alone])[CHANNELS_KEY]
        torch.testing.assert_close(condition[:, 4:, :1], model.encode_uint8([clip])[:, :, :1], **EXACT)
        assert (condition[:, 4:, 1:] - model.encode_uint8([clip])[:, :, 1:]).abs().max() > 0.01  # grey, not the clip


def test_several_videos_of_each_image_and_each_experts_guidance(load, tiny_pipelines, pictures):
    """Two prompts with two images and two samples each equal four stock calls; the steps use both experts."""
    model, case = load("wan22_i2v"), CASES["wan22_i2v"]
    shape, scales = model.latent_shape(*SIZE), {0: 4.0, 1: 2.5}
    grid, noise = model.sigmas(5, shape), draw_cpu_normal([1, 2, 3, 4], shape)
    assert {model.select_expert(s) for s in grid[:-1].tolist()} == {0, 1}
    prompts, seen = [p for p in PROMPTS for _ in range(2)], [p for p in pictures for _ in range(2)]
    call = {**model.pipeline_call_kwargs(4.0, *SIZE), "guidance_scale_2": 2.5, "prompt": prompts}
    call |= {"latents": list(noise.split(1)), "image": [Image.fromarray(picture) for picture in seen]}
    want = run_reference_pipeline(load_reference_pipeline(tiny_pipelines("wan22_i2v"), case), case, grid, **call)
    positive, negative = (
        {name: rows.repeat_interleave(2, 0) for name, rows in (text | told(model, pictures)).items()}
        for text in map(model.encode_text, (PROMPTS, ["", ""]))
    )
    got = denoise_latents(model, noise, positive, grid, solver="ode", guidance_scale=scales, uncond=negative)
    torch.testing.assert_close(got, want, **EXACT)
    assert (got[0] - got[1]).abs().max() > 0.1


# Encoding


def test_an_image_is_encoded_once_while_it_is_cached(load, pictures, monkeypatch):
    model, encoded, encode = load("wan22_i2v"), [], vae.encode_normalized
    monkeypatch.setattr(vae, "encode_normalized", lambda *args: encoded.append(args) or encode(*args))
    one = 8 * 3 * 4 * 6 * 4  # bytes of one condition
    for room, times in ((10 * one, 2), (one, 4)):
        conditions = ImageConditioner(model.pipeline, embeds=False, max_cache_bytes=room)
        encoded.clear()
        first = conditions.encode_frames(pictures, FRAMES, model.device)
        again = conditions.encode_frames(pictures, FRAMES, model.device)
        assert len(encoded) == times
        assert torch.equal(first[CHANNELS_KEY], again[CHANNELS_KEY])


def test_nothing_is_denoised_without_an_image(load):
    model = load("wan21_i2v")
    latents = draw_cpu_normal([1], model.latent_shape(*SIZE))
    with pytest.raises(ValueError, match=r"conditioning lacks .*image_channels.*image_embeds"):
        model.denoise(latents, torch.ones(1), model.encode_text(PROMPTS[:1]))
    with pytest.raises(ValueError, match="2 of 2 samples have no first frame"):
        load("wan22_i2v").encode_inputs([{}, {}], FRAMES, (HEIGHT, WIDTH))


# Variants


def test_lora_reaches_the_attention_to_the_image(load):
    assert load("wan22_i2v").default_lora_targets == ("to_q", "to_k", "to_v", "to_out.0")
    model = load("wan21_i2v")
    adapted = match_linear_layers(model.denoiser, model.default_lora_targets)
    assert {"blocks.0.attn2.add_k_proj", "blocks.1.attn2.add_v_proj"} <= set(adapted)
    assert not model.uses_clean_frames
    assert model.conditioning_frame_counts == (1,)


# Unexpected behavior of diffusers. A failing test means that a workaround can be removed.


def images_of(pictures):
    stacked = torch.from_numpy(np.stack(pictures))
    return stacked.permute(0, 3, 1, 2).float() / 255


def test_the_stock_pipeline_makes_too_many_conditions_for_two_images(load, tiny_pipelines, pictures):
    pipeline = load_reference_pipeline(tiny_pipelines("wan22_i2v"), CASES["wan22_i2v"])
    call = {
        **load("wan22_i2v").pipeline_call_kwargs(1.0, *SIZE),
        "image": images_of(pictures),
        "num_inference_steps": 1,
    }
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        pipeline(prompt=PROMPTS, generator=[torch.Generator().manual_seed(s) for s in (1, 2)], **call)


def test_stock_21_fails_for_two_videos_of_a_prompt(load, tiny_pipelines, pictures):
    pipeline = load_reference_pipeline(tiny_pipelines("wan21_i2v"), CASES["wan21_i2v"])
    call = {**load("wan21_i2v").pipeline_call_kwargs(1.0, *SIZE), "image": Image.fromarray(pictures[0])}
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        pipeline(prompt=PROMPTS[0], num_videos_per_prompt=2, num_inference_steps=1, **call)


def test_the_network_takes_the_last_512_tokens_for_the_text(load, pictures):
    """With a shorter text, the network would read image tokens as text."""
    model = load("wan21_i2v")
    latents = draw_cpu_normal([1], model.latent_shape(*SIZE))
    text, besides = model.encode_text(PROMPTS[:1]), told(model, pictures[:1])
    seen = []
    handle = model.denoiser.blocks[0].attn2.add_k_proj.register_forward_hook(
        lambda _, x, __: seen.append(x[0].shape[1])
    )
    with torch.no_grad():
        for length in (512, 500):
            short = {name: tensor[:, :length] for name, tensor in text.items()}
            model.denoise(latents, torch.ones(1), short | besides)
    handle.remove()
    assert seen[0] == besides[EMBEDS_KEY].shape[1]
    assert seen[1] != besides[EMBEDS_KEY].shape[1]
