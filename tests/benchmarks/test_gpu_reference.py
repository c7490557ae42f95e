"""The published loops for speed comparisons do the same work as ours: equal losses, gradients and forward passes."""

import os
from collections import Counter

import pytest
import torch

from benchmarks.gpu import runs
from benchmarks.gpu.against import make_reference_loop
from benchmarks.gpu.reference import Texts, Transition, add_noise, grpo_loss, log_prob, nft_loss, sde_moments, sft_loss
from wfm_ds.sampling.plan import noise_level
from wfm_ds.training.micro_batches import MicroBatch

RECIPES = {"sft": "sd3_sft_lora", "diffusion_nft": "sd3_nft", "flow_grpo": "sd3_flow_grpo"}
SMALL = ["model.max_sequence_length=16", "sampling.height=16", "sampling.width=16"]


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    """Keep the pytest process a single rank while the tests of this file compare the memory of two loops."""
    before = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    runs.join_world.cache_clear()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def side_by_side(root, tiny_pipelines, monkeypatch):
    """Our loop and the published one with equal weights. Adapters are random, so that policies differ."""
    monkeypatch.chdir(root)

    def open_ours(algorithm):
        path = root / "tests" / "recipes" / f"{RECIPES[algorithm]}.yaml"
        return runs.open_run(path, [f"model.path={tiny_pipelines('sd3')}", *SMALL])

    return open_ours


def share_weights(ours, plain):
    module = ours.loop.job.engine.module
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    found = plain.transformer.load_state_dict(dict(module.named_parameters()), strict=False)
    assert not found.unexpected_keys or all(".ema." in name for name in found.unexpected_keys)


def encode_texts(ours, prompts):
    rows = ours.loop.job.text_cache.encode(prompts)
    return Texts(rows["prompt_embeds"].float(), rows["pooled_prompt_embeds"].float())


def assert_equal_gradients(ours, our_loss, plain, plain_loss):
    """Compare the gradients of every trained tensor, by name."""
    torch.testing.assert_close(plain_loss, our_loss, rtol=2e-5, atol=1e-6)
    trained = {n: p for n, p in ours.loop.job.engine.module.named_parameters() if ".default." in n}
    wanted = torch.autograd.grad(our_loss.sum(), list(trained.values()))
    found = torch.autograd.grad(plain_loss.sum(), list(plain.trained.values()))
    assert [name.replace(".default.", ".") for name in trained] == list(plain.trained)
    assert sum(float(g.norm()) for g in wanted) > 1e-3
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()) + 1e-7)


def predict_with_policy(ours, policy, batch):
    loop = ours.loop
    with loop.job.engine.use_policy(policy):
        return loop.predict_velocity(policy, MicroBatch(batch, 0))


def without_deepspeed(ours):
    """Run forward passes on the denoiser directly, because DeepSpeed's hooks would take the gradients."""
    engine = ours.loop.job.engine
    engine.ds = engine.module


def first_batch(ours):
    """Return four loss terms of a step's first update, assembled as in the loop."""
    loop = ours.loop
    rollouts = loop.source.collect_rollouts(1)
    advantages = [0.3 * (-1) ** i * (i + 1) for i in range(len(rollouts.samples))]
    terms = loop.algorithm.updates(rollouts, advantages, 1)[0][:4]
    return loop.algorithm.assemble(terms, rollouts.local_rollouts, loop.job.world.device)


def load_shared_batch(ours):
    """Return the published loop with our weights, one of our batches, and its texts."""
    steps = make_reference_loop(ours.loop.job.recipe)
    share_weights(ours, steps.plain)
    without_deepspeed(ours)
    batch = first_batch(ours)
    return steps, batch, encode_texts(ours, [prompt.text for prompt in batch.prompts])


def test_diffusion_nft(side_by_side):
    with side_by_side("diffusion_nft") as ours:
        steps, batch, texts = load_shared_batch(ours)
        references = {policy: predict_with_policy(ours, policy, batch) for policy in ours.loop.algorithm.references}
        velocity = ours.loop.predict_velocity("policy", MicroBatch(batch, 0))
        our_loss = ours.loop.algorithm.loss(velocity, batch, references)[0]
        plain_loss = nft_loss(steps.plain, batch.clean_latents, batch.noise, batch.sigma, texts, batch.credit, old=True)
        assert_equal_gradients(ours, our_loss, steps.plain, plain_loss)


def test_flow_grpo(side_by_side):
    with side_by_side("flow_grpo") as ours:
        steps, batch, texts = load_shared_batch(ours)
        references = {"ref": predict_with_policy(ours, "ref", batch)}
        velocity = ours.loop.predict_velocity("policy", MicroBatch(batch, 0))
        loss_B, _ = ours.loop.algorithm.loss(velocity, batch, references)
        made = Transition(
            batch.latents, batch.next_latents, batch.sigma, batch.sigma + batch.dt, own_log_prob(steps, batch, texts)
        )
        negative = steps.negative.select(range(len(batch.sigma)))
        plain_loss = grpo_loss(steps.plain, made, texts, negative, batch.advantage, steps.grid[1])
        assert_equal_gradients(ours, loss_B, steps.plain, plain_loss)
        torch.testing.assert_close(made.log_prob_B, batch.rollout_log_prob, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def own_log_prob(steps, batch, texts):
    """Return log-probabilities before the first update, with the weights of the rollout, so that every ratio is 1."""
    negative = steps.negative.select(range(len(batch.sigma)))
    velocity = steps.plain.predict_guided(batch.latents, batch.sigma, texts, negative)
    level = noise_level(steps.plain.recipe.sampling)
    mean_x, std_B, _ = sde_moments(batch.latents, velocity, batch.sigma, batch.sigma + batch.dt, level, steps.grid[1])
    return log_prob(batch.next_latents, mean_x, std_B)


def test_sft(side_by_side):
    with side_by_side("sft") as ours:
        steps = make_reference_loop(ours.loop.job.recipe)
        share_weights(ours, steps.plain)
        without_deepspeed(ours)
        generator = torch.Generator().manual_seed(1)
        clean, noise = torch.randn(2, 3, *ours.loop.job.sampler.latent_shape, generator=generator)
        sigma_B, prompts = torch.tensor([0.2, 0.6, 0.9]), [f"noise number {n}" for n in range(3)]
        conditioning = ours.loop.job.text_cache.encode(prompts)
        velocity = ours.loop.job.forward("policy", add_noise(clean, noise, sigma_B), sigma_B, conditioning, 0)
        our_loss = (velocity - (noise - clean)).square().flatten(1).mean(1)
        plain_loss = sft_loss(steps.plain, clean, noise, sigma_B, encode_texts(ours, prompts))
        assert_equal_gradients(ours, our_loss, steps.plain, plain_loss)


def count_samples(module):
    """Count the samples that pass through a denoiser from now on, with and without gradient."""
    counts = Counter()

    def count_call(_, args, kwargs):
        latents = kwargs.get("hidden_states", args[0] if args else None)
        counts["with gradient" if torch.is_grad_enabled() else "without"] += len(latents)

    module.register_forward_pre_hook(count_call, with_kwargs=True)
    return counts


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_step_forwards_as_many_samples_as_ours(side_by_side, algorithm):
    with side_by_side(algorithm) as ours:
        steps = make_reference_loop(ours.loop.job.recipe)
        mine, theirs = count_samples(ours.loop.job.engine.module), count_samples(steps.plain.transformer)
        before = [parameter.detach().clone() for parameter in steps.plain.trained.values()]
        ours.loop.run_step()
        steps.step()
        assert theirs == mine
        assert mine["with gradient"] > 0
        changed = [not torch.equal(p, b) for p, b in zip(steps.plain.trained.values(), before, strict=True)]
        assert any(changed)
