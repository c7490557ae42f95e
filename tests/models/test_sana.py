"""Tests specific to SANA and SANA video; test_families.py has the tests that all families share."""

import shutil
from typing import get_args

import pytest
import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLLTX2Video,
    SanaImageToVideoPipeline,
    SanaTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)

from families import (
    CASES,
    EXACT,
    PROMPTS,
    change_json,
    copy_pipeline,
    denoise_latents,
    load_reference_pipeline,
    load_tiny,
    record_calls,
    run_reference_pipeline,
)
from wfm_ds.errors import ModelError
from wfm_ds.models.base import temporary_seed
from wfm_ds.models.conditioning_frames import add_clean_frames
from wfm_ds.models.sana import INSTRUCTION, Sana
from wfm_ds.models.sana_video import SanaVideo
from wfm_ds.sampling.latents import draw_cpu_normal

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("family", ["sana", "sana_video"])


@pytest.fixture
def pipeline(tiny_pipelines):
    """Return a function that loads the stock pipeline of a family, which a test may modify."""
    return lambda family: load_reference_pipeline(tiny_pipelines(family), CASES[family])


def shape_of(model):
    return model.latent_shape(*CASES[model.family].size)


def noise_for(model, count=2):
    return draw_cpu_normal([11, 12][:count], shape_of(model))


def one_call(model):
    """Return arguments of `denoise` with a different sigma and prompt for each sample."""
    return noise_for(model), torch.tensor([0.9, 0.3]), model.encode_text(PROMPTS)


def ours(model, conditioning, *, steps=4, w=1.0, uncond=None):
    """Sample latents with our model from `noise_for(model)`."""
    grid = model.sigmas(steps, shape_of(model))
    return denoise_latents(model, noise_for(model), conditioning, grid, solver="ode", guidance_scale=w, uncond=uncond)


def theirs(pipeline, model, *, steps=4, w=1.0, **call):
    """Sample latents with the stock pipeline on the same grid, from the same noise."""
    case = CASES[model.family]
    call = {"latents": noise_for(model), **model.pipeline_call_kwargs(w, *case.size), **call}
    return run_reference_pipeline(pipeline, case, model.sigmas(steps, shape_of(model)), **call)


def test_with_the_stock_instruction_only_prompts_get_it(tiny_pipelines, pipeline):
    """The stock pipeline prepends the instruction to prompts but not to negative prompts; ours must agree."""
    model = load_tiny(tiny_pipelines("sana"), "sana", prompt_template="stock")
    assert model.pipeline_call_kwargs(4.0, 32, 64)[INSTRUCTION][-1] == "User Prompt: "
    want = theirs(pipeline("sana"), model, w=4.0)
    conditioning = model.encode_text(PROMPTS)
    got = ours(model, conditioning, w=4.0, uncond=model.encode_negative_text([""] * 2))
    torch.testing.assert_close(got, want, **EXACT)
    wrong = ours(model, conditioning, w=4.0, uncond=model.encode_text([""] * 2))
    assert (wrong - want).abs().max() > 1e-3


@BOTH
def test_the_exported_scheduler_is_another_solver_of_the_same_model(load, pipeline, family):
    """The scheduler is second order and rounds timesteps down: 40 steps give samples close to ours, but not equal."""
    model, (height, width, frames) = load(family), CASES[family].size
    call = model.pipeline_call_kwargs(1.0, height, width, frames) | {"num_inference_steps": 40, "output_type": "pt"}
    want = pipeline(family)(PROMPTS, latents=noise_for(model), **call)[0]
    want = want.transpose(1, 2) if model.is_video else want  # diffusers returns [B, T, C, H, W]
    difference = (model.decode_latents(ours(model, model.encode_text(PROMPTS), steps=40)) - want).abs()
    assert difference.mean() < 1e-2
    assert difference.max() > 1e-5


def test_upstream_rounds_the_time_of_the_released_scheduler(pipeline):
    """If this fails, the stock pipeline uses float timesteps like ours, and the comparison above can be exact."""
    scheduler = pipeline("sana").scheduler
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 899, 749, 499]


@BOTH
def test_the_mask_changes_the_velocity_and_masked_text_does_not(load, family):
    model = load(family)
    latents, sigma, conditioning = one_call(model)
    mask = conditioning["prompt_attention_mask"]
    assert mask.dtype == torch.int64
    assert mask.sum(1).tolist() == [6, 6]  # <bos> and the words; the first word is split into characters
    velocity = model.denoise(latents, sigma, conditioning)
    noise = torch.randn(conditioning["prompt_embeds"].shape)
    masked = torch.where(mask.bool()[..., None], conditioning["prompt_embeds"], noise)
    torch.testing.assert_close(model.denoise(latents, sigma, conditioning | {"prompt_embeds": masked}), velocity)
    unmasked = model.denoise(latents, sigma, conditioning | {"prompt_attention_mask": torch.ones_like(mask)})
    assert (unmasked - velocity).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "argument"), [("sana", "num_images_per_prompt"), ("sana_video", "num_videos_per_prompt")]
)
def test_upstream_tiles_masks_in_another_order_than_embeddings(load, pipeline, family, argument):
    """The stock pipeline pairs embeddings 1,1,2,2 with masks 1,2,1,2; therefore our code repeats the rows itself."""
    prompts = ["a", "a red circle on white background"]
    one = load(family).encode_text(prompts)
    embeds, mask, _, _ = pipeline(family).encode_prompt(
        prompts, do_classifier_free_guidance=False, max_sequence_length=16, **{argument: 2}
    )
    torch.testing.assert_close(embeds, one["prompt_embeds"].repeat_interleave(2, 0), **EXACT)
    assert torch.equal(mask, one["prompt_attention_mask"].repeat(2, 1))
    assert not torch.equal(mask, one["prompt_attention_mask"].repeat_interleave(2, 0))


def test_upstream_a_video_pipeline_cannot_have_the_vae_of_the_image_models(tiny_pipelines, pipeline, tmp_path):
    """The signature allows this VAE. If this fails, remove SanaVideo.check_folder and add the VAE to models/vae.py."""
    folder, vae = tmp_path / "pipeline", pipeline("sana").vae
    assert AutoencoderDC in get_args(SanaVideoPipeline.__init__.__annotations__["vae"])
    with pytest.raises(AttributeError, match="scale_factor_temporal"):
        SanaVideoPipeline(**pipeline("sana_video").components | {"vae": vae})
    copy_pipeline(tiny_pipelines("sana_video"), folder, vae=["diffusers", "AutoencoderDC"])
    shutil.rmtree(folder / "vae")
    vae.save_pretrained(folder / "vae")
    with pytest.raises(ModelError, match=r"with the VAE AutoencoderDC .* use one with the Wan or LTX-2 VAE"):
        load_tiny(folder, "sana_video")


def test_the_network_may_have_another_unit_of_time_and_a_learned_variance(pipeline):
    changed = pipeline("sana")
    config = dict(changed.transformer.config) | {"out_channels": 8, "timestep_scale": 0.5}
    with temporary_seed(4):
        changed.transformer = SanaTransformer2DModel.from_config(config).eval()
    model = Sana(changed, None, dtype=torch.float32, device="cpu", max_sequence_length=16, prompt_template="none")
    got = ours(model, model.encode_text(PROMPTS))
    torch.testing.assert_close(theirs(changed, model), got, **EXACT)


def test_the_instruction_comes_from_the_argument_then_the_folder_then_the_pipeline(tiny_pipelines, tmp_path):
    folder = copy_pipeline(tiny_pipelines("sana"), tmp_path / "pipeline")

    def instruction(**options):
        return load_tiny(folder, "sana", **options).instruction

    stock = instruction(prompt_template="stock")
    assert stock[-1] == "User Prompt: "
    assert instruction() is None
    change_json(folder / "call.json", **{INSTRUCTION: ["Draw:", ""]})
    assert instruction() == ["Draw:", ""]
    assert instruction(prompt_template="none") is None
    (folder / "call.json").unlink()
    assert instruction() == stock


def first_frame_given(model, latents, counts):
    return add_clean_frames(model.encode_text(PROMPTS), latents, torch.tensor(counts))


def test_both_passes_of_guidance_get_the_first_frame(load, tiny_pipelines):
    model, case = load("sana_video"), CASES["sana_video"]
    height, width, _ = case.size
    clip = torch.rand(1, 3, 5, height, width, generator=torch.Generator().manual_seed(1))
    pipeline, call = case.conditioning_frames_call(tiny_pipelines("sana_video"), clip, 1)
    want = theirs(pipeline, model, w=4.0, **call)
    latents, one = model.encode_pixels(clip).expand(2, -1, -1, -1, -1), torch.tensor([1, 1])
    negative = add_clean_frames(model.encode_negative_text([""] * 2), latents, one)
    got = ours(model, add_clean_frames(model.encode_text(PROMPTS), latents, one), w=4.0, uncond=negative)
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(got[:, :, :1], latents[:, :, :1], **EXACT)


def test_samples_with_and_without_a_conditioning_frame_share_a_batch(load):
    model = load("sana_video")
    latents, sigma, plain = one_call(model)
    clip = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5))
    mixed = model.denoise(latents, sigma, first_frame_given(model, clip, [0, 1]))
    torch.testing.assert_close(mixed[:1], model.denoise(latents, sigma, plain)[:1], **EXACT)
    alone = model.denoise(latents, sigma, first_frame_given(model, clip, [1, 1]))
    torch.testing.assert_close(mixed[1:], alone[1:], **EXACT)
    clean = latents - sigma.view(-1, 1, 1, 1, 1) * mixed
    torch.testing.assert_close(clean[1, :, 0], clip[1, :, 0])


def test_tokens_of_a_conditioning_frame_have_time_zero(load):
    model = load("sana_video")
    latents, sigma, _ = one_call(model)
    with record_calls(model.denoiser) as calls:
        model.denoise(latents, sigma, first_frame_given(model, latents, [0, 1]))
    times = calls[0]["timestep"]
    assert times.shape == (2, 1, 2, 2, 4)
    torch.testing.assert_close(times[:, 0, :, 0, 0], torch.tensor([[900.0, 900.0], [0.0, 300.0]]))
    assert (times == times[..., :1, :1]).all()


def test_a_vae_with_mean_and_std_as_buffers(pipeline):
    """The LTX-2 VAE of the 720p model: factors 32 (space) and 8 (time), and a patch size of 1."""
    with temporary_seed(6):
        vae = AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8, 16, 32, 64),
            decoder_block_out_channels=(8, 16, 32),
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 4,
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ).eval()
    vae.latents_mean.copy_(torch.linspace(0, 0.3, 4))
    vae.latents_std.copy_(torch.linspace(1, 1.3, 4))
    parts = pipeline("sana_video").components
    with temporary_seed(7):
        config = dict(parts["transformer"].config) | {"patch_size": (1, 1, 1)}
        transformer = SanaVideoTransformer3DModel.from_config(config).eval()
    changed = SanaImageToVideoPipeline(**parts | {"vae": vae, "transformer": transformer})
    changed.set_progress_bar_config(disable=True)
    model = SanaVideo(changed, None, dtype=torch.float32, device="cpu", max_sequence_length=16, prompt_template="none")
    size, noise = (64, 96, 9), draw_cpu_normal([11], (4, 2, 2, 3))
    assert model.latent_shape(*size) == noise.shape[1:]
    assert model.num_tokens(noise.shape[1:]) == 12
    image = torch.rand(1, 3, 64, 96)
    call = {"prompt": PROMPTS[:1], "image": image, "latents": noise, "num_inference_steps": 2}
    latents = changed(output_type="latent", **call, **model.pipeline_call_kwargs(1.0, *size))[0]
    video = changed(output_type="pt", **call, **model.pipeline_call_kwargs(1.0, *size))[0]
    torch.testing.assert_close(model.decode_latents(latents), video.transpose(1, 2), **EXACT)
    torch.testing.assert_close(latents[:, :, :1], model.encode_pixels(image.unsqueeze(2)), **EXACT)
