import math

import numpy as np
import pytest
import torch

from each_case import check_each
from families import create_prompts, load_tiny, make_sampler, sample_latents
from wfm_ds.errors import RecipeError
from wfm_ds.models import registry, vae
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.sampler import CountingForward, GuidanceConditioning
from wfm_ds.sampling.edm import Churn, make_edm_plan
from wfm_ds.sampling.plan import deterministic_plan
from wfm_ds.types import ConditioningFrames


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("sd3"), "sd3")


@pytest.fixture(scope="module")
def video_model(tiny_pipelines):
    return load_tiny(tiny_pipelines("cosmos25"), "cosmos25")


def test_samples_start_from_the_noise_of_their_seeds_and_follow_the_plan(model):
    forward = CountingForward(model.denoise)
    drawn = make_sampler(model, forward=forward, guidance_scale=2.5, eval_steps=3)
    got = sample_latents(drawn, create_prompts("a red circle", "a cat"), [3, 4], "rollout")
    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(s)) for s in (3, 4)])
    texts, nothing = TextCache(model).encode(["a red circle", "a cat"]), TextCache(model).encode(["", ""])

    def guided(latents, sigma):
        sigma_B = torch.full((2,), sigma)
        cond, uncond = (model.denoise(latents, sigma_B, text) for text in (texts, nothing))
        return uncond + 2.5 * (cond - uncond)

    with torch.no_grad():
        want = deterministic_plan("ode", model.sigmas(3, (4, 16, 16))).denoise(guided, noise, [0, 0]).clean_latents
    assert torch.equal(got, want)
    assert forward.counts == {"rollout": 6}


def test_gradient_flows_through_the_conditional_half_only(model):
    weight = torch.ones(1, requires_grad=True)
    drawn = make_sampler(model, forward=lambda purpose, x, *_: weight * x, guidance_scale=3)
    got = drawn.predict_velocity("policy", torch.ones(1, 2), torch.ones(1), GuidanceConditioning({}, {}), 0)
    (gradient,) = torch.autograd.grad(got.sum(), weight)
    assert gradient.item() == 3 * 2


def test_both_halves_of_guidance_share_a_forward_where_they_fit(model):
    forward, shapes = CountingForward(model.denoise), []

    def noted(purpose, latents, *rest):
        shapes.append(len(latents))
        return forward(purpose, latents, *rest)

    def clean(purpose, texts, rows=None):
        joint = {} if rows is None else {"validation": rows}
        drawn = make_sampler(model, forward=noted, max_joint_rows=joint, guidance_scale=2.5, eval_steps=3)
        return sample_latents(drawn, create_prompts(*texts), [3, 4, 5][: len(texts)], purpose)

    two, three = ["a red circle", "a cat"], ["a red circle", "a cat", "a dog"]
    want = clean("validation", two)
    torch.testing.assert_close(clean("validation", two, rows=4), want, rtol=0, atol=1e-5)
    assert shapes == [2] * 6 + [4] * 3
    assert forward.counts == {"validation": 9}
    clean("validation", three, rows=4)
    clean("rollout", two, rows=4)
    assert shapes[9:] == [3] * 6 + [2] * 6


def test_halves_of_other_shapes_cannot_share_a_forward(model):
    one, longer = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    both = GuidanceConditioning({"text": one}, {"text": 2 * one}).join_halves(model)
    assert both["text"].tolist() == [*one.tolist(), *(2 * one).tolist()]
    with pytest.raises(RecipeError, match=r"joint needs texts of the same shape, but text has \[3, 4\] and"):
        GuidanceConditioning({"text": one}, {"text": longer}).join_halves(model)


def test_an_expert_whose_scale_is_1_runs_no_unconditional_pass(tiny_pipelines):
    model = load_tiny(tiny_pipelines("wan22"), "wan22")
    asked = []

    def forward(purpose, *arguments):
        asked.append(arguments[3])
        return model.denoise(*arguments[:4])

    drawn = make_sampler(model, forward=forward, guidance_scale=3, guidance_scale_low=1, eval_steps=6)
    sigmas = model.sigmas(6, drawn.latent_shape)[:-1]
    sample_latents(drawn, create_prompts("a cat"), [3])
    experts = [model.select_expert(float(sigma)) for sigma in sigmas]
    assert asked == [expert for expert in experts for _ in range(2 if expert == 0 else 1)]
    assert 0 < experts.count(0) < 6
    assert len(experts) < len(asked) < 2 * len(experts)


def test_guidance_contrasts_with_the_prompts_own_negative_text_then_the_recipes_then_the_familys(model):
    two = [*create_prompts("x", negative_text="a blue square"), *create_prompts("x")]
    for recipes_own, second in ((None, ""), ("a cat", "a cat")):
        got = make_sampler(model, guidance_scale=3, negative_prompt=recipes_own).encode_conditioning(two).negative
        want = TextCache(model).encode(["a blue square", second])
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert make_sampler(model).encode_conditioning(two).negative is None


def test_non_finite_latents_are_grey_and_named(model):
    latents = torch.randn(3, *make_sampler(model).latent_shape, generator=torch.Generator().manual_seed(0))
    whole, _ = make_sampler(model).decode_to_uint8(latents)
    latents[1, 0, 0, 0] = float("nan")
    media, finite = make_sampler(model).decode_to_uint8(latents)
    assert finite == [True, False, True]
    assert np.array_equal(media[1], model.to_uint8(model.decode_latents(torch.zeros_like(latents[:1])))[0])
    assert np.array_equal(media[[0, 2]], whole[[0, 2]])


def test_images_are_decoded_one_after_the_other(model):
    """In float32 the decoder needs gigabytes per image, more than the denoiser needs for the whole batch."""
    latents, sizes = torch.randn(3, *make_sampler(model).latent_shape), []
    with model.pipeline.vae.decoder.register_forward_hook(lambda module, args, result: sizes.append(len(args[0]))):
        media, _ = make_sampler(model).decode_to_uint8(latents)
    assert sizes == [1, 1, 1]
    assert media.shape == (3, 32, 32, 3)


@check_each(
    ("dtype", "size", "at_once"),
    [("float32", 512, 4), ("float32", 1024, 1), ("bfloat16", 512, 8), ("bfloat16", 1024, 2), ("bfloat16", 2048, 1)],
)
def test_on_a_gpu_images_are_decoded_in_batches_of_limited_size(tiny_pipelines, dtype, size, at_once):
    """A batch has the bytes of one float32 image of 1024 x 1024, whatever memory is free; nothing is computed here."""
    model = registry.load_model(
        tiny_pipelines("sana"), dtype=torch.float32, device="cpu", vae_dtype=getattr(torch, dtype)
    )
    drawn = make_sampler(model, (size, size))
    shape = drawn.latent_shape
    assert (drawn.decode_batch_size(shape), model.encode_batch_size(torch.empty(9, 3, size, size, device="meta"))) == (
        1,
        9,
    )
    model.device = torch.device("cuda")
    assert drawn.decode_batch_size(shape) == at_once
    assert model.encode_batch_size(torch.empty(9, 3, size, size, device="meta")) == at_once


def test_batched_decoding_equals_single_decoding(model):
    latents = torch.randn(3, *make_sampler(model).latent_shape, generator=torch.Generator().manual_seed(0))
    together = model.to_uint8(model.decode_latents(latents)).astype(int)
    assert np.abs(together - make_sampler(model).decode_to_uint8(latents)[0]).max() <= 1


@pytest.mark.parametrize(("num_frames", "latent_frames"), [(5, 2), (1, 1)])
def test_videos_keep_their_frames_also_a_single_one(tiny_pipelines, num_frames, latent_frames):
    model = load_tiny(tiny_pipelines("wan21"), "wan21")
    drawn = make_sampler(model, num_frames=num_frames)
    latents = torch.randn(3, *drawn.latent_shape, generator=torch.Generator().manual_seed(0))
    assert latents.shape[2] == latent_frames
    media, finite = drawn.decode_to_uint8(latents)
    assert (media.shape, media.dtype, finite) == ((3, num_frames, 32, 32, 3), np.uint8, [True] * 3)
    at_once = model.to_uint8(model.decode_latents(latents))
    assert np.abs(media.astype(int) - at_once).max() <= 1


@pytest.mark.parametrize(("size", "batches"), [({}, [5]), ({"height": 256, "width": 256}, [4, 1])])
def test_small_videos_are_decoded_in_batches_of_limited_size(video_model, size, batches):
    """The VAE decodes 4 frames at a time; 4 videos * 4 frames * 256 * 256 pixels equal one 1024 x 1024 image."""
    drawn, seen = make_sampler(video_model, num_frames=9, **size), []
    assert vae.frames_per_decode(video_model.pipeline.vae, 9) == 4
    shape = drawn.latent_shape
    assert [len(part) for part in torch.zeros(5, *shape).split(drawn.decode_batch_size(shape))] == batches
    if not size:
        latents = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
        hook = video_model.pipeline.vae.post_quant_conv.register_forward_hook(lambda m, i, o: seen.append(len(o)))
        media, _ = drawn.decode_to_uint8(latents)
        hook.remove()
        assert set(seen) == set(batches)
        alone = np.concatenate([video_model.to_uint8(video_model.decode_latents(row[None])) for row in latents])
        assert np.abs(media.astype(int) - alone).max() <= 1


def test_cached_latents_of_a_video_do_not_depend_on_the_batch(video_model):
    pixels = torch.rand(3, 3, 9, 32, 32, generator=torch.Generator().manual_seed(0))
    together = video_model.encode_pixels(pixels)
    assert all(torch.equal(together[i : i + 1], video_model.encode_pixels(pixels[i : i + 1])) for i in range(3))


@check_each("plan", ["ode", "edm"])
@check_each("guidance_scale", [1.0, 2.5])
def test_samples_start_with_the_conditioning_frames(video_model, plan, guidance_scale):
    drawn = make_sampler(video_model, guidance_scale=guidance_scale, num_frames=9, eval_steps=3)
    churn = Churn.from_settings(3, s_churn=1.0, s_t_min=0.0, s_t_max=math.inf, s_noise=1.0)
    steps = drawn.evaluation_plan() if plan == "ode" else make_edm_plan("edm_2ab", 3, churn)
    latents = torch.randn((2, *drawn.latent_shape), generator=torch.Generator().manual_seed(0))
    conditional_frames = ConditioningFrames(latents, torch.tensor([1, 2]))
    got = drawn.generate(
        "rollout", create_prompts("a", "b"), [3, 4], steps, conditional_frames=conditional_frames
    ).clean_latents
    torch.testing.assert_close(got[0, :, :1], latents[0, :, :1], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1, :, :2], latents[1, :, :2], rtol=0, atol=1e-5)
    assert (got[0, :, 1:] - latents[0, :, 1:]).abs().max() > 0.1
    alone = drawn.generate(
        "rollout",
        create_prompts("a"),
        [3],
        steps,
        conditional_frames=ConditioningFrames(latents[:1], torch.tensor([1])),
    ).clean_latents
    torch.testing.assert_close(alone, got[:1], rtol=0, atol=1e-4)
    free = drawn.generate("rollout", create_prompts("a"), [3], steps).clean_latents
    assert (free[0, :, 1:] - got[0, :, 1:]).abs().max() > 1e-4  # the conditioning frames change the other frames
