import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank
from wfm_ds.algorithms import engine_policy_copies
from wfm_ds.algorithms.advantages import Rewards
from wfm_ds.algorithms.ddrl import Ddrl
from wfm_ds.algorithms.sft import loss_weight
from wfm_ds.algorithms.supervised import velocity_errors
from wfm_ds.errors import RecipeError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.sampling.latents import draw_cpu_normal
from wfm_ds.training.micro_batches import merge_part_stats
from wfm_ds.types import Prompt

RECIPE = Path(__file__).parent.parent / "recipes" / "sd3_ddrl.yaml"
IMAGE, VIDEO = (2, 5, 4), (2, 3, 5, 4)
ADVANTAGES = [0.7, -1.3, 0.4, None]
PURE = ["algorithm.data_beta=0", "algorithm.kl_beta=0"]


def ddrl(*overrides):
    return Ddrl(recipe_file.load_recipe(RECIPE, list(overrides)), torch.tensor([1.0, 0.0]))


class Denoiser:
    """A velocity model with two weights, used for rollouts and for training."""

    def __init__(self):
        self.weights = torch.tensor([0.3, -0.2], requires_grad=True)

    def __call__(self, latents, sigma):
        sigma = torch.as_tensor(sigma, dtype=torch.float32).view(-1, *[1] * (latents.ndim - 1))
        return torch.sin(3 * self.weights[0] * latents) + self.weights[1] * sigma * latents

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.weights)[0]


def rolled_out(algorithm, denoiser, shape=IMAGE, num_conditional_frames=0, step=1, stored=None):
    count = len(ADVANTAGES)
    seeds, noise_seeds = [100 + i for i in range(count)], [200 + i for i in range(count)]
    plan = algorithm.plan(step) if stored is None else algorithm._make_plan(stored)
    done = plan.denoise(denoiser, draw_cpu_normal(noise_seeds, shape), seeds)
    draw = torch.Generator().manual_seed(7)
    rollouts = [
        make_rollout(
            i,
            done.clean_latents[i],
            noise_seed=noise_seeds[i],
            group_id=f"g{i // 2}",
            prompt=Prompt(id=f"p{i}", text=f"prompt {i}"),
            states={k: states[i] for k, states in done.states.items()},
            data_latents=torch.randn(shape, generator=draw),
            num_conditioning_frames=num_conditional_frames,
        )
        for i in range(count)
    ]
    return on_one_rank(rollouts)


def batch_of(algorithm, samples, advantages=ADVANTAGES, step=1):
    (terms,) = algorithm.updates(samples, advantages, step)
    return algorithm.assemble(terms, samples.local_rollouts, torch.device("cpu"))


def test_a_batch_contains_only_the_data_that_its_loss_uses():
    algorithm = ddrl()
    batch = batch_of(algorithm, rolled_out(algorithm, Denoiser()))
    assert {field.name for field in dataclasses.fields(batch.data)} == {"term_indices", "clean_latents", "noise"}


def total(algorithm, denoiser, batch, references=None):
    """Return the loss of the training loop: the mean over the terms with weight 1."""
    loss_B, _ = algorithm.loss(denoiser(batch.latents, batch.sigma), batch, references or {})
    return (loss_B * batch.weight).sum() / batch.weight.sum()


@check_each("norm", ["gaussian", "literal", "std_scaled"])
def test_without_data_and_reference_it_is_the_policy_gradient_of_the_rollouts_transitions(norm):
    algorithm, denoiser = ddrl(*PURE, f"algorithm.ratio_norm={norm}"), Denoiser()
    num_steps = algorithm.sampling.steps
    samples = rolled_out(algorithm, denoiser, stored=range(num_steps))
    got = denoiser.gradient(total(algorithm, denoiser, batch_of(algorithm, samples)))

    reinforce = torch.zeros(())
    for sample, advantage in zip(samples.local_rollouts, ADVANTAGES, strict=True):
        states = {k: state[None] * (1 + algorithm.edm_plan.steps[k].level) for k, state in sample.states.items()}
        clean = {k: s[None] - algorithm.edm_plan.steps[k].sigma * denoiser(s[None], algorithm.edm_plan.steps[k].sigma)
                 for k, s in sample.states.items()}  # fmt: skip
        for k in algorithm.training_steps(1):
            step = algorithm.edm_plan.steps[k]
            before = step.previous_clean_coef * clean[k - 1].detach() if k else 0.0
            mean = step.state_coef * states[k] + step.clean_coef * clean[k] + before
            log_prob = -(states[k + 1] - mean).square().mean() / (2 * step.std**2)
            scale = {"gaussian": 1, "literal": 2 * step.std**2, "std_scaled": step.std}[norm]
            reinforce = reinforce - (advantage or 0.0) * scale * log_prob
    want = denoiser.gradient(reinforce / (3 * len(algorithm.training_steps(1))))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=0)


def test_equal_rewards_leave_the_diffusion_loss_on_the_data():
    algorithm, denoiser = ddrl("algorithm.data_beta=0.3"), Denoiser()
    samples = rolled_out(algorithm, denoiser)
    batch = batch_of(algorithm, samples, [0.0] * 4)
    losses = []
    for sample in samples.local_rollouts:
        for k in algorithm.training_steps(1):
            sigma = torch.tensor([algorithm.edm_plan.steps[k].sigma])
            noise = draw_cpu_normal([sample.noise_seed], IMAGE)
            velocity = denoiser((1 - sigma) * sample.data_latents[None] + sigma * noise, sigma)
            losses.append(loss_weight("edm", sigma) * velocity_errors(velocity, sample.data_latents[None], noise))
    want = 0.3 * denoiser.gradient(torch.cat(losses).mean())
    torch.testing.assert_close(denoiser.gradient(total(algorithm, denoiser, batch)), want, rtol=1e-5, atol=1e-7)


def test_on_policy_the_loss_is_minus_the_advantage_plus_the_data_term():
    algorithm, denoiser = ddrl(), Denoiser()
    batch = batch_of(algorithm, rolled_out(algorithm, denoiser))
    loss_B, stats = algorithm.loss(denoiser(batch.latents, batch.sigma), batch, {})
    assert torch.equal(stats["loss/policy"], -batch.transitions.advantage)
    torch.testing.assert_close(loss_B, -batch.transitions.advantage + 0.01 * stats["loss/data"][0])
    assert batch.weight.tolist() == [1.0] * 9 + [0.0] * 3
    scaled, of_scaled = ddrl("algorithm.loss_scale=10").loss(denoiser(batch.latents, batch.sigma), batch, {})
    torch.testing.assert_close(scaled, 10 * loss_B)
    assert torch.equal(of_scaled["loss/total"], stats["loss/total"])


def test_the_data_counts_once_for_each_trained_step_or_with_the_first_only():
    denoiser, gradients, rows = Denoiser(), {}, {}
    for steps, first_only in [("[1]", False), ("[1]", True), ("[0,1,2]", False), ("[0,1,2]", True)]:
        algorithm = ddrl(f"algorithm.train_on={steps}", f"algorithm.data_on_first_only={first_only}")
        batch = batch_of(algorithm, rolled_out(algorithm, denoiser))
        gradients[steps, first_only] = denoiser.gradient(total(algorithm, denoiser, batch))
        rows[steps, first_only] = batch.data.term_indices.tolist()
    assert torch.equal(gradients["[1]", False], gradients["[1]", True])
    assert not torch.equal(gradients["[0,1,2]", False], gradients["[0,1,2]", True])
    assert rows["[0,1,2]", True] == [0, 3, 6, 9]
    assert rows["[0,1,2]", False] == list(range(12))


@check_each("overrides", [[], ["algorithm.data_on_first_only=true"], PURE])
def test_micro_batching_changes_no_gradient(overrides):
    algorithm, denoiser = ddrl(*overrides), Denoiser()
    samples = rolled_out(algorithm, denoiser)
    (terms,) = algorithm.updates(samples, ADVANTAGES, 1)

    def gradient(sizes):
        loss, start = torch.zeros(()), 0
        for size in sizes:
            batch = algorithm.assemble(terms[start : start + size], samples.local_rollouts, torch.device("cpu"))
            loss_B, _ = algorithm.loss(denoiser(batch.latents, batch.sigma), batch, {})
            loss, start = loss + (loss_B * batch.weight).sum() / 9, start + size
        return denoiser.gradient(loss)

    torch.testing.assert_close(gradient([1] * 12), gradient([12]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient([5, 7]), gradient([12]), rtol=1e-5, atol=1e-7)


OWN_NOISE = ["algorithm.use_rl_sigma_and_noise=false"]
FIRST_ONLY = ["algorithm.data_on_first_only=true"]
GIVEN = ["algorithm.min_num_conditional_frames=1", "algorithm.max_num_conditional_frames=2"]


@check_each("overrides", [[], FIRST_ONLY, OWN_NOISE, GIVEN])
def test_the_parts_of_divided_terms_have_their_loss_their_gradient_and_their_statistics(overrides):
    kept = ["algorithm.kl_beta=0.5", "algorithm.data_beta=0.3", "rollout.policy=reference", *overrides]
    joint, separate = ddrl(*kept), ddrl(*kept, "algorithm.data_forward=separate")
    denoiser, reference = Denoiser(), Denoiser()
    samples = rolled_out(joint, reference, VIDEO, num_conditional_frames=1)
    with torch.no_grad():
        denoiser.weights += 0.05
    whole, divided = batch_of(joint, samples), batch_of(separate, samples)
    assert torch.equal(whole.reference_inputs().latents, divided.reference_inputs().latents)
    references = {"ref": reference(whole.reference_inputs().latents, whole.sigma[:12]).detach()}
    want_B, want = joint.loss(denoiser(whole.latents, whole.sigma), whole, references)

    assert whole.parts() == [whole]
    states, data = divided.parts()
    assert [len(states.latents), len(data.latents)] == [12, len(whole.latents) - 12]
    assert states.prompts + data.prompts == whole.prompts
    found = [separate.loss(denoiser(part.latents, part.sigma), part, references) for part in (states, data)]
    torch.testing.assert_close(sum(loss_B for loss_B, _ in found), want_B)
    torch.testing.assert_close(
        denoiser.gradient(sum((loss_B * divided.weight).sum() for loss_B, _ in found)),
        denoiser.gradient((want_B * whole.weight).sum()),
        rtol=1e-6,
        atol=1e-7,
    )
    got = merge_part_stats([stats for _, stats in found])
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("first_only", "num_parts"), [(False, [2, 2, 2]), (True, [2, 1, 1])])
def test_only_terms_with_data_are_divided(first_only, num_parts):
    settings = ["algorithm.data_forward=separate", f"algorithm.data_on_first_only={first_only}"]
    algorithm = ddrl(*settings)
    (terms,) = algorithm.updates(rolled_out(algorithm, Denoiser()), ADVANTAGES, 1)
    assert [t.num_parts for t in terms] == num_parts * 4
    assert algorithm.settings.num_separate_data_terms(12) == sum(n == 2 for n in num_parts) * 4
    assert ddrl().settings.num_separate_data_terms(12) == 0


def test_the_data_can_have_separate_noise_and_levels():
    algorithm, denoiser = ddrl("algorithm.use_rl_sigma_and_noise=false"), Denoiser()
    samples = rolled_out(algorithm, denoiser)
    batch, again = batch_of(algorithm, samples), batch_of(algorithm, samples)
    assert torch.equal(batch.data.noise, again.data.noise)
    levels = batch.sigma[12:].tolist()
    assert len(set(levels)) == 12
    assert not set(levels) & set(batch.sigma[:12].tolist())
    assert not torch.equal(batch.data.noise[0], batch.data.noise[1])
    assert not torch.equal(batch_of(algorithm, samples, step=2).sigma[12:], batch.sigma[12:])


@pytest.mark.parametrize("rollout_policy", ["current", "reference"])
def test_the_reference_is_evaluated_only_on_rollouts(rollout_policy):
    kept = ["algorithm.kl_beta=0.5", "algorithm.clip_ratio=100", f"rollout.policy={rollout_policy}"]
    algorithm, denoiser, reference = ddrl(*kept), Denoiser(), Denoiser()
    assert algorithm.references == ("ref",)
    assert algorithm.rollout_policy == ("train" if rollout_policy == "current" else "ref")
    batch = batch_of(algorithm, rolled_out(algorithm, reference))
    asked = batch.reference_inputs()
    assert torch.equal(asked.latents, batch.latents[:12])
    assert asked.prompts == batch.prompts[:12]
    with torch.no_grad():
        denoiser.weights += 0.05
        answer = reference(asked.latents, asked.sigma)
    velocity = denoiser(batch.latents, batch.sigma)
    _, stats = algorithm.loss(velocity, batch, {"ref": answer})
    d = batch.transitions.gain.view(-1, 1, 1, 1) * (velocity[:12] - answer).detach()
    torch.testing.assert_close(stats["loss/kl"], d.square().flatten(1).mean(1) / 2)
    moved = "policy/ratio_mean" in stats
    assert moved == (rollout_policy == "reference")
    if moved:
        log_rho = (batch.transitions.noise * d - d.square() / 2).flatten(1).mean(1) * batch.transitions.std
        torch.testing.assert_close(stats["policy/ratio_mean"], log_rho.exp(), rtol=1e-5, atol=1e-6)
    # the loop omits references with the same weights as the trained policy
    _, equal = algorithm.loss(velocity, batch, {})
    assert not equal["loss/kl"].any()


def test_an_updated_reference_is_a_copy_with_an_interval():
    algorithm = ddrl("algorithm.kl_beta=0.1", "algorithm.update_ref_every=3")
    assert algorithm.references == ("old",)
    assert [algorithm.policy_decays(step, step) for step in (1, 2, 3, 6)] == [{}, {}, {"old": 0.0}, {"old": 0.0}]
    assert ddrl("algorithm.kl_beta=0.1").policy_decays(3, 3) == {}
    assert engine_policy_copies(recipe_file.load_recipe(RECIPE, [])) == frozenset()


def given_recipe(*overrides):
    return ddrl("algorithm.min_num_conditional_frames=1", "algorithm.max_num_conditional_frames=2", *overrides)


def test_conditioning_frames_are_excluded_from_all_terms():
    algorithm, denoiser = given_recipe("algorithm.kl_beta=0.5", "algorithm.data_beta=0.3"), Denoiser()
    batch = batch_of(algorithm, rolled_out(algorithm, denoiser, VIDEO, num_conditional_frames=1))
    assert batch.conditioning_frames.latents.shape == (24, *VIDEO)
    assert batch.conditioning_frames.counts.tolist() == [1] * 24
    velocity = denoiser(batch.latents, batch.sigma).detach().requires_grad_()
    loss_B, _ = algorithm.loss(velocity, batch, {"ref": velocity[:12].detach() + 0.1})
    gradient = torch.autograd.grad(loss_B.sum(), velocity)[0]
    assert not gradient[:, :, 0].any()
    assert gradient[:, :, 1:].abs().amin() > 0
    assert algorithm.settings.conditioning_frame_range == (1, 2)
    assert batch_of(ddrl(), rolled_out(ddrl(), denoiser, VIDEO)).conditioning_frames is None


def test_exponential_rewards_replace_the_advantages():
    rewards = Rewards([0.0, 1.0, 1.0, 2.0], [(0.0,), (1.0,), (1.0,), (2.0,)], (1.0,), {})
    plain = ddrl().compute_advantages(rewards, ["g"] * 4).values
    exponential = ddrl("algorithm.exp_reward=true").compute_advantages(rewards, ["g"] * 4).values
    centred = ddrl("algorithm.exp_reward=true", "algorithm.exp_reward_baseline=1").compute_advantages(
        rewards, ["g"] * 4
    )
    assert exponential == pytest.approx([-math.exp(-a) for a in plain])
    assert centred.values == pytest.approx([1 - math.exp(-a) for a in plain])
    assert exponential == sorted(exponential)


def test_only_the_best_and_worst_samples_of_groups_with_unequal_rewards_are_trained():
    totals = [0.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    rewards = Rewards(totals, [(total,) for total in totals], (1.0,), {})
    algorithm = ddrl("algorithm.best_of_n=2", "algorithm.zero_std=drop")
    values = algorithm.compute_advantages(rewards, list("aaaabbbb")).values
    assert [value is not None for value in values] == [True, False, False, True, *[False] * 4]


def test_an_extra_step_is_drawn_from_all_others_that_have_noise():
    algorithm = ddrl("algorithm.train_on=[1,-1]", "sampling.steps=6")
    drawn = Counter(next(k for k in algorithm.training_steps(step) if k != 1) for step in range(1, 1601))
    assert sorted(drawn) == [0, 2, 3, 4]
    # chi-square test, 99.9 %, 3 degrees of freedom
    assert sum((count - 400) ** 2 / 400 for count in drawn.values()) < 16.3
    assert algorithm.plan(3).stored_steps == tuple(algorithm.training_steps(3))


@check_each(
    ("overrides", "message"),
    [
        (["sampling.s_churn=0"], r"steps \[0, 1, 2\] add no noise, only \[\] do"),
        (["sampling.s_t_max=50"], r"steps \[0\] add no noise, only \[1, 2, 3\] do"),
        (["algorithm.train_on=[0,1,2,3,-1]"], r"-1 adds a random one of the stochastic steps \[0, 1, 2, 3\]"),
        (
            [
                "algorithm.ratio_norm=gaussian",
                "rollout.policy=reference",
                "sampling.steps=10",
                "algorithm.train_on=[8]",
            ],
            r"the noise std at steps \[8\] is below 0\.05, too low to compare two policies",
        ),
        (["sampling.steps=300", "sampling.s_churn=30", "sampling.s_t_max=20"], "do not decrease"),
    ],
)
def test_steps_without_usable_noise_are_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        ddrl(*overrides)


@check_each(
    ("overrides", "message"),
    [
        (["algorithm.train_on=[3,4]"], "must be at most 3 with sampling.steps 5"),
        (["algorithm.train_on=[1,1]"], "has a duplicate step"),
        (["sampling.solver=ode"], "does not support sampling.solver ode: set it to edm_2ab or edm_euler"),
        (["sampling.noise_level=0.5"], "does not read noise_level: set s_churn"),
        (["sampling.s_t_min=5", "sampling.s_t_max=2"], "s_t_min 5.0 must be below s_t_max 2.0"),
        (["algorithm.update_ref_every=4"], "updates a reference policy that is not used"),
        (["sampling.guidance_scale=3"], "trains predictions without guidance"),
        (["data.kind=prompts"], "data_beta needs captioned images or videos.* set data.kind: paired"),
        (["algorithm.data_beta=0", "algorithm.data_on_first_only=true"], "need a diffusion loss, but data_beta is 0"),
        (["algorithm.data_beta=0", "algorithm.data_forward=separate"], "need a diffusion loss, but data_beta is 0"),
        (["algorithm.exp_reward_baseline=1"], "only read with exp_reward"),
        (["algorithm.exp_reward=true", "algorithm.adv_mode=one_only"], "drops these: set exp_reward_baseline"),
        (["algorithm.min_num_conditional_frames=1"], "is above max_num_conditional_frames 0"),
        (["algorithm.updates_per_rollout=2"], "updates_per_rollout"),
    ],
)
def test_combinations_that_cannot_be_are_recipe_errors(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe_file.load_recipe(RECIPE, overrides)


@check_each(
    ("override", "message"),
    [
        ("sampling.solver=edm_2ab", "is only for algorithm ddrl"),
        ("sampling.s_churn=1", "does not read s_churn"),
        ("rollout.policy=current", "rollout.policy is only for algorithm ddrl"),
    ],
)
def test_keys_of_ddrl_are_refused_in_other_algorithms(override, message):
    with pytest.raises(RecipeError, match=message):
        recipe_file.load_recipe(RECIPE.parent / "sd3_nft.yaml", [override])


def test_a_run_without_data_causes_a_warning():
    assert "algorithm.data_beta" in recipe_file.load_recipe(RECIPE, PURE).algorithm.list_warnings()[0]
    assert recipe_file.load_recipe(RECIPE, []).algorithm.list_warnings() == []
