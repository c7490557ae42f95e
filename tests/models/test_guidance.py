"""Guidance passes: guidance at some noise levels only, and skip-layer guidance of SD3."""

import pytest
import torch

import families
from families import CASES, create_prompts, load_reference_pipeline, load_tiny, sample_latents
from wfm_ds.cli.main import main
from wfm_ds.errors import ModelError
from wfm_ds.models.guidance import NEGATIVE_PASS, choose_rows

PROMPTS = create_prompts("a red circle", "a cat")
SEEDS = [3, 4]


@pytest.fixture(scope="module")
def model(tiny_pipelines):
    return load_tiny(tiny_pipelines("sd3"), "sd3")


def make_sampler(model, **settings):
    sampler = families.make_sampler(model, max_joint_rows={"joint": 4}, **{"guidance_scale": 3.0, **settings})
    model.check_sampling(sampler.settings)
    return sampler


def draw(sampler, purpose="sample"):
    return sample_latents(sampler, PROMPTS, SEEDS, purpose)


@pytest.mark.parametrize(("steps", "skipped"), [(10, 1), (15, 2)])
def test_skip_layer_guidance_equals_the_diffusers_pipeline(steps, skipped, model, tiny_pipelines):
    guidance = {"skip_layers": [1], "skip_scale": 2.5}
    sampler = make_sampler(model, eval_steps=steps, guidance=guidance)
    pipeline = load_reference_pipeline(tiny_pipelines("sd3"), CASES["sd3"])
    want = pipeline(
        prompt=[prompt.text for prompt in PROMPTS],
        num_inference_steps=steps,
        **model.pipeline_call_kwargs(3.0, 32, 32),
        skip_guidance_layers=[1],
        skip_layer_guidance_scale=2.5,
        generator=[torch.Generator().manual_seed(seed) for seed in SEEDS],
        output_type="latent",
    ).images
    got = draw(sampler)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert sampler.forward.counts == {"sample": 2 * steps + skipped}
    torch.testing.assert_close(draw(sampler, "joint"), want, rtol=0, atol=1e-5)
    assert sampler.forward.counts["joint"] == steps + skipped
    assert (draw(make_sampler(model, eval_steps=steps)) - want).abs().max() > 1e-3


def test_guidance_in_an_interval_is_used_at_its_noise_levels_only(model):
    everywhere = draw(make_sampler(model, eval_steps=6))
    assert torch.equal(draw(make_sampler(model, eval_steps=6, guidance={"interval": [0.0, 1.0]})), everywhere)
    sampler = make_sampler(model, eval_steps=6, guidance={"interval": [0.5, 0.9]})
    conditions = sampler.encode_conditioning(PROMPTS)
    levels = []

    def predict(latents, sigma):
        sigma_B = torch.full((2,), sigma)
        cond = model.denoise(latents, sigma_B, conditions.positive)
        if not 0.5 <= sigma <= 0.9:
            return cond
        levels.append(sigma)
        negative = model.denoise(latents, sigma_B, conditions.negative)
        return negative + 3.0 * (cond - negative)

    noise = torch.cat([torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS])
    with torch.no_grad():
        want = sampler.evaluation_plan().denoise(predict, noise, [0, 0]).clean_latents
    assert torch.equal(draw(sampler), want)
    assert 0 < len(levels) < 6
    assert sampler.forward.counts == {"sample": 6 + len(levels)}


def test_samples_of_different_noise_levels_get_the_guidance_of_their_own(model):
    """Training batches have several levels. They run all passes, and equal the predictions of rollouts bit for bit."""
    guidance = {"interval": [0.3, 0.95], "skip_layers": [0], "skip_interval": [0.6, 0.8]}
    sampler = make_sampler(model, guidance=guidance)
    sigma = torch.tensor([0.98, 0.7, 0.5, 0.1])
    prompts = create_prompts(*(f"number {i}" for i in range(4)))
    latents = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    conditions = sampler.encode_conditioning(prompts)
    together = sampler.predict_velocity("policy", latents, sigma, conditions, 0)
    assert sampler.forward.counts == {"policy": 1, "uncond": 2}
    assert together.requires_grad
    for i, names in enumerate(([], ["negative", "skip"], ["negative"], [])):
        passes = model.guidance_passes(sampler.settings, 0, float(sigma[i]))
        assert [one.name for one in passes] == names
        # All four rows again: a CPU kernel may round differently for another batch size.
        alone = sampler.predict_velocity("policy", latents, sigma[[i] * 4], conditions, 0, passes=passes)
        assert torch.equal(together[i], alone[i])
    together.square().sum().backward()  # the gradient goes through the conditional pass only
    unguided = make_sampler(model, guidance_scale=1.0)
    assert model.guidance_passes(unguided.settings, 0) == ()
    assert model.guidance_passes(make_sampler(model).settings, 0) == (NEGATIVE_PASS,)
    for parameter in model.unwrapped_denoiser.parameters():
        parameter.grad = None


def test_rollouts_and_training_round_noise_levels_in_the_same_way(model):
    """Rollouts compare the float64 level of a step, training compares its float32 value."""
    settings = make_sampler(model, guidance={"interval": [0.75, 0.8]}).settings
    for level in (0.7499999999999999, 0.75, 0.8000000000000002, 0.7499, 0.8001):
        ones = torch.ones(1, 1)
        trained = choose_rows(torch.tensor([level], dtype=torch.float32), 0.75, 0.8, ones, 0 * ones)
        assert bool(trained) == bool(model.guidance_passes(settings, 0, level)), level


def test_settings_that_cannot_be_used_are_refused(model, tiny_pipelines):
    with pytest.raises(ModelError, match=r"skip_layers \[1, 2\]: blocks are 0 to 1"):
        make_sampler(model, guidance={"skip_layers": [1, 2]})
    with pytest.raises(ModelError, match=r"wan has no sampling.guidance.skip_layers: remove it"):
        make_sampler(load_tiny(tiny_pipelines("wan21"), "wan21"), guidance={"skip_layers": [1]})
    for settings, message in (
        ({"guidance": {"interval": [0.5, 0.5]}}, r"interval must be \[low, high\] with low < high"),
        ({"guidance": {"interval": [0, 0.5]}, "guidance_scale": 1.0}, "guidance needs a guidance_scale above 1"),
        ({"guidance": {"skip_scale": 1.0}}, "skip_layers"),
    ):
        with pytest.raises(ValueError, match=message):
            make_sampler(model, **settings)


def test_commands_take_the_settings_of_guidance(tiny_pipelines, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a red circle")
    fixed = ["--model", str(tiny_pipelines("sd3")), "--prompts", str(tmp_path / "prompts.txt"), "--steps", "6"]

    def generate(name, *options):
        size = ["--height", "32", "--width", "32"]
        return main(["generate", *fixed, *size, "--out", str(tmp_path / name), *options])

    assert generate("full", "--guidance", "3") == 0
    assert generate("part", "--guidance", "3", "--guidance-settings", "{interval: [0.5, 0.9]}") == 0
    images = [next((tmp_path / name).rglob("*.png")).read_bytes() for name in ("full", "part")]
    assert images[0] != images[1]
    for options, message in (
        (["--guidance", "3", "--guidance-settings", "interval: [0.9, 0.5]"], "must be [low, high] with low < high"),
        (["--guidance", "3", "--guidance-settings", "{skip: 1}"], "skip"),
        (["--guidance-settings", "{interval: [0.2, 0.9]}"], "needs --guidance above 1"),
    ):
        assert generate("bad", *options) == 2
        assert message in capsys.readouterr().err
