"""DMD2: its gradient in float64, signs on Gaussians, noise levels, loss terms, and the reward losses beside it."""

import math

import pytest
import torch

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms.advantages import Rewards
from wfm_ds.algorithms.diffusion_nft import nft_loss
from wfm_ds.algorithms.dmd2 import Dmd2, TransitionReward, dmd_direction, dmd_loss, draw_level, transition_reward_loss
from wfm_ds.recipe.algorithms import NoiseLevels
from wfm_ds.sampling.denoise import transition_mean
from wfm_kernels import sde_coefficients

FP64 = torch.float64
GRID = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=FP64)
SHAPE = (4, 3, 3)
RENOISE = {"solver": "cps", "noise_level": 1}


def build(sampling=None, reward=None, rollout=None, **keys):
    algorithm = {"name": "dmd2", "fake": {"updates": 2}, "levels": {"shift": 1}, **keys}
    sections = {"reward": None}
    if reward is not None:
        algorithm["reward"] = reward
        sections = {}
    sections |= {"lora": {"rank": 4, "alpha": 8}}
    recipe = rl_recipe(algorithm, sampling={"steps": 4, "eval_steps": 4, **(sampling or {})}, **sections)
    return Dmd2(recipe, GRID)


def roll_out(algorithm, count=3, **fields):
    noise = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))
    path = algorithm.plan(1).denoise(lambda x, sigma: torch.tanh(x) + sigma, noise, list(range(count)))
    return [
        make_rollout(
            i,
            path.clean_latents[i],
            states={k: x[i] for k, x in path.states.items()},
            predictions={k: h[i] for k, h in path.predictions.items()},
            **fields,
        )
        for i in range(count)
    ]


def inputs(*, video=False, seed=0):
    shape = (3, 2, 4, 3, 3) if video else (3, *SHAPE)
    t, f, y, h, x, v = torch.randn(6, *shape, dtype=FP64, generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([0.0, 1, 1, 1]).view(1, 1, 4, 1, 1) if video else None
    return t, f, y, h, x, v, torch.tensor([0.2, 0.6, 0.95], dtype=FP64), mask


@check_each("video", [False, True])
def test_the_gradient_is_that_of_the_published_loss_in_float64(video):
    """Published: mean((h - sg(h - d))^2) / 2 with d = (D_fake - D_real) / mean|h - D_real|."""
    t, f, y, h, x, v, s, mask = inputs(video=video)
    sigma = torch.tensor([1.0, 0.75, 0.25], dtype=FP64)
    v.requires_grad_()
    dmd_loss(v, x, sigma, dmd_direction(t, f, y, s, h, mask), mask).sum().backward()

    w = v.detach().clone().requires_grad_()
    parts = []
    for i in range(3):
        counted = slice(None) if mask is None else (slice(None), slice(1, None))
        real, fake = (y[i] - s[i] * t[i])[counted], (y[i] - s[i] * f[i])[counted]
        direction = (fake - real) / (h[i][counted] - real).abs().mean()
        own = (x[i] - sigma[i] * w[i])[counted]
        parts.append(0.5 * (own - (own - direction).detach()).square().mean())
    sum(parts).backward()
    torch.testing.assert_close(v.grad, w.grad, rtol=1e-12, atol=1e-15)
    assert v.grad.abs().max() > 0


def test_the_gradient_is_zero_if_the_fake_score_predicts_like_the_teacher():
    t, _, y, h, x, v, s, _ = inputs()
    v.requires_grad_()
    dmd_loss(v, x, s, dmd_direction(t, t, y, s, h), None).sum().backward()
    assert not v.grad.any()


def test_a_tiny_difference_to_the_teacher_is_not_divided_by_zero():
    t, f, y, _, _, _, s, _ = inputs()
    real = y - s.view(-1, 1, 1, 1) * t
    direction = dmd_direction(t, f, y, s, real)
    assert direction.isfinite().all()
    torch.testing.assert_close(direction, 1e3 * s.view(-1, 1, 1, 1) * (t - f))


def exact_velocity(x, s, mean, std):
    """Return the velocity that predicts x0 ~ N(mean, std^2) from x = (1 - s) x0 + s eps."""
    clean = mean + (1 - s) * std**2 / ((1 - s) ** 2 * std**2 + s**2) * (x - (1 - s) * mean)
    return (x - clean) / s


@check_each("mean, std", [(1.0, 0.7), (-0.2, 0.7), (0.3, 1.1), (0.3, 0.35), (0.3, 0.7)])
def test_on_gaussians_the_gradient_points_to_the_mean_and_the_width_of_the_teacher(mean, std):
    generator, count = torch.Generator().manual_seed(0), 200_000
    h = mean + std * torch.randn(count, 1, 1, 1, dtype=FP64, generator=generator)
    s = 0.02 + 0.96 * torch.rand(count, dtype=FP64, generator=generator)
    column = s.view(-1, 1, 1, 1)
    y = (1 - column) * h + column * torch.randn(h.shape, dtype=FP64, generator=generator)
    teacher, fake = exact_velocity(y, column, 0.3, 0.7), exact_velocity(y, column, mean, std)
    direction = column * (teacher - fake)  # without the division, which only scales each sample
    scaled = dmd_direction(teacher, fake, y, s, h)
    assert (scaled.sign() == direction.sign()).all()
    to_mean, to_std = float(direction.mean()), float((direction * (h - mean) / std).mean())
    for slope, difference in ((to_mean, mean - 0.3), (to_std, std - 0.7)):
        assert slope == pytest.approx(0, abs=2e-3) if difference == 0 else slope * difference > 1e-3


def test_cps_with_noise_level_one_renoises_the_prediction():
    rows = sde_coefficients("cps", GRID[:-1], GRID[1:], eta=1.0, sigma_max=float(GRID[1]))
    x, v = torch.randn(2, 4, *SHAPE, dtype=FP64)
    s, after = (g.view(-1, 1, 1, 1) for g in (GRID[:-1], GRID[1:]))
    torch.testing.assert_close(transition_mean(v, x, rows), (1 - after) * (x - s * v))
    torch.testing.assert_close(rows[:, 2], GRID[1:])


@check_each(
    "keys, shift, quantiles",
    [
        ({}, 1.0, {0.0: 0.02, 0.5: 0.5, 1.0: 0.98}),
        ({"min": 0.5, "max": 0.9}, 1.0, {0.25: 0.6, 0.5: 0.7}),
        ({"min": 0.001, "max": 0.999}, 3.0, {0.5: 0.75}),  # sigma = 3 q / (1 + 2 q) at q = 1/2
        ({"density": "logit_normal"}, 1.0, {0.0: 0.02, 0.5: 0.5, 1.0: 0.98}),
        ({"density": "logit_normal", "min": 0.001, "max": 0.999}, 1.0, {0.8413447: math.e / (1 + math.e)}),
        ({"density": "logit_normal", "min": 0.5, "max": 0.98}, 3.0, {0.0: 0.5, 1.0: 0.98}),
    ],
)
def test_noise_levels_have_the_density_of_the_recipe_between_its_bounds(keys, shift, quantiles):
    levels = NoiseLevels(**keys)
    for quantile, level in quantiles.items():
        assert draw_level(levels, shift, quantile) == pytest.approx(level, abs=2e-3), quantile
    drawn = [draw_level(levels, shift, i / 100) for i in range(101)]
    assert drawn == sorted(drawn)


def test_the_fake_score_trains_before_the_student_and_alone_in_the_warm_up():
    algorithm = build(fake={"updates": 2, "warmup_steps": 1})
    rollouts = roll_out(algorithm)
    warm, usual = (algorithm.updates(on_one_rank(rollouts), [0.0] * 3, step) for step in (1, 2))
    trained = [[algorithm.choose_adapter(step, update) for update in range(3)] for step in (1, 2)]
    assert trained == [["fake"] * 3, ["fake", "fake", "default"]]
    assert [[t.trains_fake for t in terms] for terms in warm] == [[True] * 3] * 3
    assert [[t.trains_fake for t in terms] for terms in usual] == [[True] * 3] * 2 + [[False] * 3]
    assert [algorithm.needs_reference(terms[0], "fake") for terms in usual] == [False, False, True]
    assert len({t.noise_seed for terms in [*warm, *usual] for t in terms}) == 18
    assert len({t.level for terms in [*warm, *usual] for t in terms}) == 18


def test_terms_depend_on_the_sample_and_not_on_its_rank():
    algorithm = build()
    rollouts = roll_out(algorithm, 4)
    together = algorithm.updates(on_one_rank(rollouts), [0.0] * 4, 2)
    second = on_one_rank(rollouts[2:])
    second.first_index = 2
    alone = algorithm.updates(second, [0.0] * 4, 2)
    for all_terms, own in zip(together, alone, strict=True):
        assert [(t.denoise_step, t.level, t.noise_seed) for t in all_terms[2:]] == [
            (t.denoise_step, t.level, t.noise_seed) for t in own
        ]


def test_all_denoising_steps_are_equally_likely():
    algorithm = build(fake={"updates": 400})
    updates = algorithm.updates(on_one_rank(roll_out(algorithm, 5)), [0.0] * 5, 1)
    drawn = torch.bincount(torch.tensor([t.denoise_step for terms in updates[:-1] for t in terms]))
    assert drawn.tolist() == pytest.approx([500] * 4, abs=80)


def test_the_batches_are_made_of_the_states_and_predictions_of_the_rollout():
    algorithm = build()
    rollouts = roll_out(algorithm)
    fake_terms, _, student_terms = algorithm.updates(on_one_rank(rollouts), [0.0] * 3, 1)
    fake, student = (algorithm.assemble(terms, rollouts, torch.device("cpu")) for terms in (fake_terms, student_terms))
    for i, (term, own) in enumerate(zip(fake_terms, student_terms, strict=True)):
        state, h = rollouts[i].states[own.denoise_step], rollouts[i].predictions[own.denoise_step]
        torch.testing.assert_close(h, state - own.sigma * (torch.tanh(state) + own.sigma))
        assert torch.equal(student.latents[i], state)
        assert torch.equal(student.prediction[i], h)
        prediction = rollouts[i].predictions[term.denoise_step]
        noise = fake.target[i] + prediction
        torch.testing.assert_close(fake.latents[i], (1 - term.level) * prediction + term.level * noise)
        assert float(fake.sigma[i]) == pytest.approx(term.level)
    references = student.reference_inputs()
    assert torch.equal(references.latents, student.noisy_prediction)
    assert torch.equal(references.sigma, student.level)
    last = rollouts[0]
    assert torch.equal(last.predictions[3], last.clean_latents)  # the last step ends at its prediction


def test_a_perfect_fake_score_has_no_loss():
    algorithm = build()
    rollouts = roll_out(algorithm)
    terms = algorithm.updates(on_one_rank(rollouts), [0.0] * 3, 1)[0]
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    loss, stats = algorithm.loss(batch.target, batch, {})
    assert not loss.any()
    assert algorithm.loss(batch.target + 2, batch, {})[0].tolist() == pytest.approx([4.0] * 3)
    assert set(stats) == {"dmd/fake_loss"}


def test_the_gap_is_the_rms_of_the_direction():
    algorithm = build()
    rollouts = roll_out(algorithm)
    terms = algorithm.updates(on_one_rank(rollouts), [0.0] * 3, 1)[-1]
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    t, f, v = torch.randn(3, 3, *SHAPE)
    _, stats = algorithm.loss(v, batch, {"teacher": t, "fake": f})
    direction = dmd_direction(t, f, batch.noisy_prediction, batch.level, batch.prediction)
    torch.testing.assert_close(stats["dmd/gap"], direction.square().mean((1, 2, 3)).sqrt())


def test_samples_without_a_reward_still_train_and_broken_samples_do_not():
    algorithm = build(sampling=RENOISE, reward={"loss": "flow_grpo"})
    totals = [1.0, None, 3.0]
    advantages = algorithm.compute_advantages(Rewards(totals, [(r,) for r in (1, 0, 3)], (1.0,), {}), ["g"] * 3)
    assert advantages.values[1] == 0
    assert advantages.values[0] == -advantages.values[2] < 0
    rollouts = roll_out(algorithm)
    rollouts[2] = make_rollout(
        2, rollouts[2].clean_latents, states=rollouts[2].states, predictions=rollouts[2].predictions, is_finite=False
    )
    for terms in algorithm.updates(on_one_rank(rollouts), advantages.values, 1):
        assert [t.weight for t in terms] == [1.0, 1.0, 0.0]
        assert [t.advantage for t in terms] == advantages.values


def test_the_policy_gradient_is_the_advantage_times_the_score_of_the_transition():
    rows = sde_coefficients("cps", GRID[:3], GRID[1:4], eta=1.0, sigma_max=float(GRID[1]))
    rows[:, 3] = 0.5 / rows[:, 2].square()  # Gaussian log-density, as in stochastic_plan
    x, v, after = torch.randn(3, 3, *SHAPE, generator=torch.Generator().manual_seed(1))
    v.requires_grad_()
    advantage = torch.tensor([0.7, -1.2, 0.0])
    transition = TransitionReward(next_latents=after, coefficients=rows, advantage=advantage, factor=torch.ones(3))
    loss = transition_reward_loss(v, x, transition)
    torch.testing.assert_close(loss, -advantage)
    loss.sum().backward()
    w = v.detach().double().requires_grad_()
    mean = transition_mean(w, x.double(), rows)
    log_prob = torch.distributions.Normal(mean, rows[:, 2].view(-1, 1, 1, 1).expand_as(mean)).log_prob(after.double())
    (-advantage.double() * log_prob.flatten(1).mean(1)).sum().backward()
    torch.testing.assert_close(v.grad.double(), w.grad, rtol=1e-4, atol=1e-7)


@check_each(
    "sampling, factors",
    [
        (RENOISE, [4 / 3, 4 / 3, 4 / 3, 0.0]),
        ({"solver": "flow_sde"}, [4 / 3, 4 / 3, 4 / 3, 0.0]),
        ({**RENOISE, "window": {"kind": "random", "size": 1, "range": [1, 2]}}, [0.0, 4.0, 0.0, 0.0]),
    ],
)
def test_the_expected_reward_loss_is_the_mean_over_the_steps_with_noise(sampling, factors):
    algorithm = build(sampling=sampling, reward={"loss": "flow_grpo", "weight": 2}, fake={"updates": 1})
    rollouts = roll_out(algorithm, 60)
    terms = algorithm.updates(on_one_rank(rollouts), [1.0] * 60, 1)[-1]
    assert {t.denoise_step for t in terms} == {0, 1, 2, 3}
    assert all(t.transition_factor == pytest.approx(factors[t.denoise_step]) for t in terms)
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    v = torch.tanh(batch.latents) + batch.sigma.view(-1, 1, 1, 1)
    same = {"teacher": v, "fake": v}  # no distillation loss
    loss, _ = algorithm.loss(v, batch, same)
    torch.testing.assert_close(loss, torch.tensor([-2 * factors[t.denoise_step] for t in terms]))
    for term, following in zip(terms, batch.transition.next_latents, strict=True):
        if term.denoise_step < 3:
            assert torch.equal(following, rollouts[term.row].states[term.denoise_step + 1])


def test_diffusion_nft_is_a_second_part_on_the_finished_sample_with_noise():
    algorithm = build(reward={"loss": "diffusion_nft", "weight": 3, "beta": 0.5, "adv_clip_max": 2})
    rollouts = roll_out(algorithm)
    *fake, terms = algorithm.updates(on_one_rank(rollouts), [1.0, -2.0, 0.0], 1)
    assert {t.num_parts for part in fake for t in part} == {1}
    assert {t.num_parts for t in terms} == {2}
    batch = algorithm.assemble(terms, rollouts, torch.device("cpu"))
    first, second = batch.parts()
    assert first is batch
    assert torch.equal(second.clean_latents, torch.stack([r.clean_latents for r in rollouts]))
    s = second.sigma.view(-1, 1, 1, 1)
    torch.testing.assert_close(second.latents, (1 - s) * second.clean_latents + s * second.noise)
    assert second.credit.tolist() == pytest.approx([0.75, 0.0, 0.5])
    assert not {t.reward_level for t in terms} & {t.level for t in terms}
    v = torch.randn(3, *SHAPE, requires_grad=True)
    loss, _ = algorithm.loss(v, second, {})
    expected, _ = nft_loss(
        v,
        v.detach(),
        second.clean_latents,
        second.noise,
        second.sigma,
        second.credit,
        beta=0.5,
        adv_clip_max=2,
        kl_beta=0.0,
    )
    torch.testing.assert_close(loss, 3 * expected)
    loss[2].backward()
    assert not v.grad.any()  # advantage 0
