"""Callers of tested formulas, compared with a second implementation: which tensor, setting and key each one passes."""

import math
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import torch

from algorithms import test_ddrl as ddrl_case
from algorithms import test_flow_grpo as grpo_case
from multi_rank.training import TARGETS, small_sd3
from wfm_ds.algorithms.diffusion_nft import DiffusionNft
from wfm_ds.algorithms.forward_process import ForwardBatch
from wfm_ds.engine.adapter_layers import use_merged_weights
from wfm_ds.engine.policies import add_adapters
from wfm_ds.models import registry
from wfm_ds.models.assets.text_cache import TextCache
from wfm_ds.models.base import NegativeText
from wfm_ds.models.guidance import NEGATIVE_PASS
from wfm_ds.models.sampler import CountingForward, Sampler
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe.sampling import SamplingRecipe
from wfm_ds.recipe.sections import LoraRecipe
from wfm_ds.seeds import draw_uniform
from wfm_ds.training.sft import SftLoop
from wfm_ds.types import Prompt

GRID = torch.tensor([1.0, 0.6, 0.0], dtype=torch.float64)


def nft(root, *overrides):
    return DiffusionNft(recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_nft.yaml", list(overrides)), GRID)


def row_mean(x):
    return x.flatten(1).mean(1)


def test_nft_passes_its_clip_and_its_distances_to_the_loss(root):
    algorithm = nft(root, "algorithm.adv_clip_max=2", "algorithm.kl_beta=0.3", "algorithm.beta=0.6")
    draw = torch.Generator().manual_seed(0)
    v, old, ref, clean, noise = (torch.randn(3, 4, 5, 5, generator=draw) for _ in range(5))
    v.requires_grad_()
    sigma, r = torch.tensor([0.3, 0.6, 0.9]), torch.tensor([0.2, 0.5, 0.9])
    batch = ForwardBatch(
        latents=noise, sigma=sigma, weight=torch.ones(3), prompts=[], clean_latents=clean, noise=noise, credit=r
    )
    loss, _ = algorithm.loss(v, batch, {"old": old, "ref": ref})

    w, s, u = v.detach().double().requires_grad_(), sigma.view(-1, 1, 1, 1).double(), (noise - clean).double()
    halves = []
    for sign in (1, -1):
        error = s * (u - old.double() - sign * 0.6 * (w - old.double()))
        halves.append(row_mean(error**2) / row_mean(error.detach().abs()))
    want = 2 * (r * halves[0] + (1 - r) * halves[1]) / 0.6 + 0.3 * row_mean((w - ref.double()) ** 2)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0)
    (got,), (gradient,) = torch.autograd.grad(loss.sum(), v), torch.autograd.grad(want.sum(), w)
    torch.testing.assert_close(got.double(), gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    credits = [algorithm.credit_from_advantage(a) for a in (-3.0, -1.0, 0.0, 1.0)]
    assert credits == [0.0, 0.25, 0.5, 0.75]


def test_the_old_policy_decays_by_update_and_not_by_step(root):
    algorithm = nft(root, "algorithm.old_decay={initial: 0.1, slope: 0.05, max: 0.9}")
    assert algorithm.policy_decays(3, 8) == {"old": pytest.approx(0.5)}
    assert algorithm.policy_decays(8, 3) == {"old": pytest.approx(0.25)}


def test_flow_grpo_clips_each_side_at_its_own_bound():
    bounds = {"clip_ratio_low": 9e-5, "clip_ratio_high": 2.5e-4}
    rl = grpo_case.algorithm(updates_per_rollout=2, old_log_prob="rollout", **bounds)
    old = grpo_case.Denoiser()
    policy = old.moved(0.003)
    advantages = [0.3, 0.7, 0.2, -1.3]
    [batch] = grpo_case.micro_batches(rl, grpo_case.rolled_out(rl, old), advantages, update=1)
    loss, stats, gradient = grpo_case.evaluated(rl, batch, policy)
    ratio = 1 + stats["policy/ratio_std"]
    for side, sign in (("higher", 1), ("lower", -1)):
        clipped = stats[f"policy/clip_fraction_{side}"].bool()
        assert (clipped & (sign * batch.advantage > 0)).any()
        assert not clipped.all()
    assert ((ratio < 1 - 9e-5) & (ratio > 1 - 2.5e-4) & (batch.advantage < 0)).any()  # the other bound would not clip
    want, want_gradient = grpo_case.published(rl, batch, policy, old)
    torch.testing.assert_close(loss.double(), want, rtol=0, atol=2e-5 * want.abs().max().item())
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=2e-4 * want_gradient.abs().max().item())


@pytest.mark.parametrize("shape", [ddrl_case.IMAGE, ddrl_case.VIDEO], ids=["image", "video"])
def test_ddrl_clips_ratios_to_the_rollout_policy_on_both_sides(shape):
    clip = 4e-3
    words = ["rollout.policy=reference", f"algorithm.clip_ratio={clip}", "algorithm.kl_beta=0.2"]
    algorithm, denoiser, reference = (
        ddrl_case.ddrl("algorithm.data_beta=0", *words),
        ddrl_case.Denoiser(),
        ddrl_case.Denoiser(),
    )
    advantages = [0.7, -1.3, 0.4, -0.2]
    batch = ddrl_case.batch_of(algorithm, ddrl_case.rolled_out(algorithm, reference, shape), advantages)
    with torch.no_grad():
        denoiser.weights += 0.05
        answer = reference(batch.latents, batch.sigma)
    loss, stats = algorithm.loss(denoiser(batch.latents, batch.sigma), batch, {"ref": answer})
    got = denoiser.gradient(loss.sum())

    noise, gain, std = batch.transitions.noise, batch.transitions.gain, batch.transitions.std
    d = gain.view(-1, *[1] * len(shape)) * (denoiser(batch.latents, batch.sigma) - answer)
    ratio = (row_mean(noise * d - d**2 / 2) * std).exp()
    a = batch.transitions.advantage
    want = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)) + 0.2 * row_mean(d**2) / 2
    for side, sign in (("higher", 1), ("lower", -1)):
        clipped = stats[f"policy/clip_fraction_{side}"].bool()
        assert torch.equal(clipped, sign * (ratio.detach() - 1) > clip)
        assert (clipped & (sign * a > 0)).any()
        assert not clipped.all()
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, denoiser.gradient(want.sum()), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [ddrl_case.IMAGE, ddrl_case.VIDEO], ids=["image", "video"])
def test_ddrl_draws_higher_noise_levels_for_the_data_of_videos(shape):
    algorithm = ddrl_case.ddrl("algorithm.data_beta=0.3", "algorithm.use_rl_sigma_and_noise=false")
    samples = ddrl_case.rolled_out(algorithm, ddrl_case.Denoiser(), shape, step=2)
    (terms,) = algorithm.updates(samples, ddrl_case.ADVANTAGES, 2)
    seed, checked = algorithm.run_seed, 0
    for term in terms:
        key = (2, samples.local_rollouts[term.row].seed, term.index)
        if draw_uniform(seed, "data_sigma_noisy", *key) < 0.05:
            continue
        level = NormalDist(math.log(4), 1.2).inv_cdf(draw_uniform(seed, "data_sigma", *key))
        level = math.exp(level) * (math.sqrt(24) if shape == ddrl_case.VIDEO else 1)
        assert term.data.sigma == pytest.approx(level / (1 + level), rel=1e-9)
        checked += 1
    assert checked > 6


def test_each_expert_predicts_with_its_own_guidance_scale(tiny_pipelines):
    model = registry.load_model(tiny_pipelines("wan22"), dtype=torch.float32, device="cpu")
    settings = SamplingRecipe(height=32, width=32, guidance_scale=3.0, guidance_scale_low=1.5, negative_prompt="dull")
    texts = TextCache(model)
    sampler = Sampler(model=model, text_cache=texts, settings=settings, forward=CountingForward(model.denoise))
    latents = torch.randn(2, *sampler.latent_shape, generator=torch.Generator().manual_seed(1))
    conditions = sampler.encode_conditioning([Prompt(id=text, text=text) for text in ("a cat", "a dog")])
    for sigma, expert, scale in ((0.97, 0, 3.0), (0.4, 1, 1.5)):
        assert model.select_expert(sigma) == expert
        level = torch.full((2,), sigma)
        with torch.no_grad():
            positive = model.denoise(latents, level, texts.encode(["a cat", "a dog"]), expert)
            negative = model.denoise(latents, level, texts.encode([NegativeText("dull")] * 2), expert)
            want = negative + scale * (positive - negative)
            got = sampler.predict_velocity("policy", latents, level, conditions, expert)
            joint = sampler.predict_joint_velocity("policy", latents, level, conditions, expert, [NEGATIVE_PASS])
        assert (positive - negative).abs().max() > 1e-3
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(joint, want, rtol=1e-4, atol=1e-5)


def test_captions_are_dropped_anew_in_each_epoch(root):
    share, count = 0.4, 300
    recipe = recipe_file.load_recipe(root / "tests" / "recipes" / "sd3_sft.yaml", [f"data.caption_dropout={share}"])
    loop = SimpleNamespace(job=SimpleNamespace(recipe=recipe))

    def dropped(epoch):
        samples = [
            SimpleNamespace(epoch=epoch, sample_id=f"{i}", prompt=Prompt(id="a", text="a")) for i in range(count)
        ]
        return [isinstance(SftLoop.sample_caption(loop, sample), NegativeText) for sample in samples]

    first, second = dropped(0), dropped(1)
    for epoch, drops in ((0, first), (1, second)):
        seed = recipe.run.seed
        assert drops == [draw_uniform(seed, "caption_dropout", epoch, f"{i}") < share for i in range(count)]
    changed = sum(one != other for one, other in zip(first, second, strict=True)) / count
    assert changed == pytest.approx(2 * share * (1 - share), abs=0.12)


@pytest.mark.parametrize("rslora", [False, True])
def test_a_merged_adapter_is_scaled_as_its_recipe_says(rslora):
    denoiser, rank, alpha = small_sd3().eval(), 16, 8
    adapters = add_adapters(denoiser, LoraRecipe(rank=rank, alpha=alpha, rslora=rslora), TARGETS, ["old"], seed=0)
    draw = torch.Generator().manual_seed(2)
    wanted = []
    with torch.no_grad():
        for layer in adapters.layers:
            a, b = layer.lora_A["old"].weight, layer.lora_B["old"].weight
            b.copy_(3 * torch.randn(b.shape, generator=draw))
            scale = alpha / math.sqrt(rank) if rslora else alpha / rank
            wanted.append(layer.get_base_layer().weight.double() + scale * b.double() @ a.double())
    adapters.activate(None)
    with use_merged_weights(adapters.layers, "old"):
        for layer, want in zip(adapters.layers, wanted, strict=True):
            torch.testing.assert_close(layer.get_base_layer().weight.double(), want, rtol=1e-5, atol=1e-5)
