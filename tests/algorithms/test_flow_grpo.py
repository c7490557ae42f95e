"""Flow-GRPO loss compared with the published formulas in float64, on rollouts of a small linear denoiser."""

import logging
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from each_case import check_each
from rl_cases import make_rollout, on_one_rank, rl_recipe
from wfm_ds.algorithms import build_rl_algorithm
from wfm_ds.algorithms.flow_grpo import FlowGrpo
from wfm_ds.algorithms.policy_ratio import divergence_policy_loss, ppo_clip_loss, step_divergence
from wfm_ds.errors import RecipeError
from wfm_ds.recipe.rollout import RolloutRecipe
from wfm_ds.rollout.groups import extract_transitions
from wfm_ds.sampling.plan import STD_COLUMN
from wfm_kernels import reference

FP64 = torch.float64
GRID = torch.tensor([1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0])
GRID = GRID.to(FP64)
LEVELS = {"flow_sde": 0.7, "dance": 0.3, "cps": 0.8}
SHAPE = (4, 3, 5)
ADVANTAGES = [0.7, -1.3, 2.0, -0.4]


def algorithm(*, solver="flow_sde", sampling=None, rollout=None, **keys):
    sampling = {"steps": 10, "solver": solver, **(sampling or {})}
    recipe = rl_recipe({"name": "flow_grpo", **keys}, sampling=sampling, rollout=rollout or {})
    built = build_rl_algorithm(recipe, GRID)
    assert isinstance(built, FlowGrpo)
    return built


class Denoiser:
    """v = W x + b(sigma) over channels. The velocity of a sample does not depend on its batch, bit by bit."""

    def __init__(self, seed=0, dtype=torch.float32):
        draw = torch.Generator().manual_seed(seed)
        self.weight = (0.4 * torch.randn(4, 4, generator=draw)).to(dtype).requires_grad_()

    def __call__(self, x, sigma):
        mixed = sum(self.weight[:, c].view(-1, 1, 1) * x[:, c : c + 1] for c in range(4))
        return mixed + torch.as_tensor(sigma, dtype=x.dtype).view(-1, 1, 1, 1)

    def moved(self, size, seed=1):
        """Return another policy with weights that differ by about `size`."""
        other = Denoiser(dtype=self.weight.dtype)
        draw = torch.Generator().manual_seed(seed)
        other.weight = (self.weight.detach() + size * torch.randn(4, 4, generator=draw)).requires_grad_()
        return other


def rolled_out(rl, denoiser, count=4, step=1):
    """Return rollouts of a single rank."""
    noise = torch.randn((count, *SHAPE), generator=torch.Generator().manual_seed(5))
    seeds = [100 + i for i in range(count)]
    trajectory = rl.plan(step).denoise(denoiser, noise, seeds)
    samples = [
        make_rollout(
            i,
            trajectory.clean_latents[i],
            seed=seeds[i],
            transitions=extract_transitions(trajectory, i, replace_nonfinite=False),
        )
        for i in range(count)
    ]
    return on_one_rank(samples)


def micro_batches(rl, rollouts, advantages=ADVANTAGES, *, update=0, size=1000, step=1):
    terms = rl.updates(rollouts, advantages, step)[update]
    parts = [terms[i : i + size] for i in range(0, len(terms), size)]
    return [rl.assemble(part, rollouts.local_rollouts, torch.device("cpu")) for part in parts]


def evaluated(rl, batch, denoiser, **references):
    """Return the losses, the statistics, and the gradient of the sum of the losses."""
    velocity = denoiser(batch.latents, batch.sigma)
    with torch.no_grad():
        predictions = {name: policy(batch.latents, batch.sigma) for name, policy in references.items()}
    loss, stats = rl.loss(velocity, batch, predictions)
    gradient = torch.autograd.grad((loss * batch.weight).sum(), denoiser.weight)[0]
    return loss.detach(), stats, gradient


def published(rl, batch, denoiser, old, ref=None):
    """Return the loss [B] with the formulas of the papers in float64, and its gradient for the denoiser's weight."""
    s, policy = rl.settings, Denoiser(dtype=FP64)
    policy.weight = denoiser.weight.detach().double().requires_grad_()
    x, x_next, sigma = batch.latents.double(), batch.next_latents.double(), batch.sigma.double()
    after = torch.stack([GRID[int(k) + 1] for k in batch.denoise_step])
    level = torch.full_like(sigma, LEVELS[rl.sampling.solver])

    def step_of(model):
        velocity = policy(x, sigma) if model is None else model(batch.latents, batch.sigma).detach().double()
        kind = rl.sampling.solver
        return velocity, *reference.sde_mean_and_std(kind, x, velocity, sigma, after, level, float(GRID[1]))

    kind = "dance" if s.log_prob == "gaussian" else rl.sampling.solver
    v, mean, std = step_of(None)
    _, old_mean, _ = step_of(old)
    log_ratio = reference.sde_log_prob(kind, x_next, mean, std) - reference.sde_log_prob(kind, x_next, old_mean, std)
    if s.guard:
        bias = reference.sample_mean((mean - old_mean) ** 2) / (2 * std.flatten() ** 2)
        gaussian = [reference.sde_log_prob("dance", x_next, m, std) for m in (mean, old_mean)]
        log_ratio = (gaussian[0] - gaussian[1] + bias) * std.flatten()
    ratio, a = log_ratio.exp(), batch.advantage.double()
    if s.trust_region == "divergence":
        kl = reference.sample_mean((mean - old_mean) ** 2) / (2 * std.flatten() ** 2)
        onward = ((ratio > 1) & (a > 0)) | ((ratio < 1) & (a < 0))
        loss = torch.where((kl >= s.divergence) & onward, 0.0, -a * ratio)
    else:
        low, high = s.clip_ratio_low or s.clip_ratio, s.clip_ratio_high or s.clip_ratio
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    if s.guard and s.guard_reweight:
        loss = loss / (sigma - after)
    if ref is not None:
        v_ref, ref_mean, _ = step_of(ref)
        g_square = std.flatten() ** 2 / (sigma - after)
        distance = {
            "velocity": reference.sample_mean((v - v_ref) ** 2),
            "gaussian": reference.sample_mean((mean - ref_mean) ** 2) / (2 * std.flatten() ** 2),
            "flow_grpo": reference.sample_mean((mean - ref_mean) ** 2) / (2 * g_square),
        }
        loss = loss + s.kl_beta * distance[s.kl_type]
    return loss.detach(), torch.autograd.grad(loss.sum(), policy.weight)[0]


VARIANTS = {
    "flow_sde": {},
    "dance": {"solver": "dance"},
    "cps": {"solver": "cps"},
    "cps, gaussian": {"solver": "cps", "log_prob": "gaussian"},
    "kl of velocities": {"kl_beta": 0.3, "kl_type": "velocity"},
    "kl of gaussians": {"kl_beta": 0.3, "kl_type": "gaussian"},
    "kl of flow_grpo": {"kl_beta": 0.3, "kl_type": "flow_grpo", "solver": "dance"},
    "two clip ratios": {"clip_ratio_low": 1e-3, "clip_ratio_high": 2e-3},
    "guard": {"guard": True},
    "guard, cps, not reweighted": {"guard": True, "solver": "cps", "guard_reweight": False},
    "divergence": {"trust_region": "divergence", "divergence": 6e-7, "kl_beta": 0.3},
    "divergence, cps": {"trust_region": "divergence", "divergence": 6e-7, "solver": "cps"},
    "divergence, guard": {"trust_region": "divergence", "divergence": 6e-7, "guard": True},
}


@check_each("name", VARIANTS)
def test_loss_and_gradient_are_the_published_ones_in_float64(name):
    keys = {"updates_per_rollout": 2, "old_log_prob": "rollout"} | VARIANTS[name]
    if not keys.keys() & {"clip_ratio_low", "trust_region"}:
        keys["clip_ratio"] = 0.05
    sampling = {"window": {"kind": "subset", "size": 8, "indices": list(range(8))}}
    rl, old, ref = algorithm(sampling=sampling, **keys), Denoiser(), Denoiser(seed=3)
    [batch] = micro_batches(rl, rolled_out(rl, old), update=1)
    policy = old.moved(0.003)
    loss, stats, gradient = evaluated(rl, batch, policy, **({"ref": ref} if "kl_beta" in keys else {}))
    want, want_gradient = published(rl, batch, policy, old, ref if "kl_beta" in keys else None)
    assert loss.shape == batch.sigma.shape
    assert loss.dtype == torch.float32
    assert stats["policy/ratio_max_abs_dev"].max() > 1e-4
    if rl.uses_divergence:
        assert 0.1 < stats["policy/clip_fraction_active"].mean() < 0.9
    torch.testing.assert_close(loss.double(), want, rtol=0, atol=2e-5 * want.abs().max().item())
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=0, atol=2e-4 * want_gradient.abs().max().item())


@check_each("old_log_prob", ["auto", "recompute"])
@check_each("variant", ["flow_sde", "guard", "divergence", "divergence, guard"])
def test_later_updates_use_the_log_probs_of_the_rollout_weights(old_log_prob, variant):
    keys = {"updates_per_rollout": 2} | VARIANTS[variant]
    if "trust_region" not in keys:
        keys["clip_ratio"] = 0.05
    old = Denoiser()
    policy = old.moved(0.003)
    results = []
    for mode in ("rollout", old_log_prob):
        rl = algorithm(old_log_prob=mode, **keys)
        [batch] = micro_batches(rl, rolled_out(rl, old), update=1)
        results.append(evaluated(rl, batch, policy, **({"old": old} if mode == "recompute" else {})))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-4, atol=1e-5)


@check_each("size", [1, 3, 1000])
@check_each("old_log_prob", ["auto", "rollout", "recompute"])
@check_each("name", VARIANTS)
def test_before_the_first_update_every_ratio_is_exactly_one(name, old_log_prob, size):
    keys = {"updates_per_rollout": 2, "old_log_prob": old_log_prob} | VARIANTS[name]
    rl, denoiser = algorithm(sampling={"window": {"kind": "random", "size": 4}}, **keys), Denoiser()
    for batch in micro_batches(rl, rolled_out(rl, denoiser), size=size):
        ref = denoiser if rl.settings.kl_beta else None
        loss, stats, gradient = evaluated(rl, batch, denoiser, **({"ref": denoiser} if ref else {}))
        reweighted = rl.settings.guard and rl.settings.guard_reweight
        assert torch.equal(loss, -batch.advantage / (-batch.dt if reweighted else 1))
        assert not stats["policy/ratio_max_abs_dev"].any()
        assert not stats["policy/ratio_start_abs_dev"].any()
        assert not stats["policy/clip_fraction_active"].any()
        assert not stats["policy/approx_kl"].any()
        want = published(rl, batch, denoiser, denoiser, ref)[1]
        torch.testing.assert_close(gradient.double(), want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_a_clipped_ratio_has_no_gradient():
    rl, old = algorithm(clip_ratio=1e-6, updates_per_rollout=2), Denoiser()
    [batch] = micro_batches(rl, rolled_out(rl, old), update=1)
    policy = old.moved(0.05)
    velocity = policy(batch.latents, batch.sigma).detach().requires_grad_()
    loss, stats = rl.loss(velocity, batch, {})
    gradient = torch.autograd.grad(loss.sum(), velocity)[0].flatten(1).abs().amax(1)
    active = stats["policy/clip_fraction_active"].bool()
    assert active.any()
    assert not active.all()
    assert torch.equal(gradient == 0, active)
    ratio = 1 + stats["policy/ratio_std"]  # ratio_std contains the deviation from 1
    assert torch.equal(active, torch.where(batch.advantage > 0, ratio > 1 + 1e-6, ratio < 1 - 1e-6))


THOUSANDTHS = st.integers(-3000, 3000).map(lambda n: n / 1000)


@given(st.lists(st.tuples(THOUSANDTHS, THOUSANDTHS, st.floats(0, 1e-3)), min_size=1), st.floats(0, 1e-3))
def test_the_divergence_limit_drops_only_distant_terms_that_move_away(terms, bound):
    log_ratio, advantage, divergence = torch.tensor(terms, dtype=torch.float32).T
    log_ratio.requires_grad_()
    ratio = log_ratio.detach().double().exp()
    onward = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
    for limit, dropped in ((bound, onward & (divergence >= bound)), (0.0, onward), (math.inf, onward & False)):
        loss = divergence_policy_loss(log_ratio, divergence, advantage, limit)
        gradient = torch.autograd.grad(loss.sum(), log_ratio)[0]
        plain = -advantage.double() * ratio  # both the loss and its gradient with respect to the log-ratio
        want = torch.where(dropped, 0.0, plain).float()
        torch.testing.assert_close(loss.detach(), want, rtol=1e-6, atol=1e-40)
        torch.testing.assert_close(gradient, want, rtol=1e-6, atol=1e-40)
        assert not gradient[dropped].any()


def test_an_infinite_ratio_of_a_dropped_step_leaves_all_gradients_finite():
    log_ratio = torch.tensor([200.0, 0.1], requires_grad=True)
    loss = divergence_policy_loss(log_ratio, torch.tensor([1.0, 0.0]), torch.ones(2), 1e-5)
    assert torch.isinf(log_ratio.detach().exp()[0])
    assert torch.autograd.grad(loss.sum(), log_ratio)[0].tolist() == pytest.approx([0.0, -math.exp(0.1)])


def test_equal_rewards_give_no_gradient_and_samples_without_advantage_have_weight_0():
    rl, denoiser = algorithm(), Denoiser()
    rollouts = rolled_out(rl, denoiser)
    [batch] = micro_batches(rl, rollouts, [0.0, 0.0, 0.0, 0.0])
    assert not evaluated(rl, batch, denoiser)[2].any()
    [partly] = micro_batches(rl, rollouts, [None, 1.0, None, -1.0])
    assert partly.weight.tolist() == [0.0] * 9 + [1.0] * 9 + [0.0] * 9 + [1.0] * 9


@pytest.mark.parametrize("name", ["log_ratio", "advantage"])
def test_inputs_that_would_broadcast_are_refused(name):
    arguments = {"log_ratio": torch.zeros(3), "advantage": torch.zeros(3)}
    arguments[name] = arguments[name].view(3, 1)
    with pytest.raises(ValueError, match="one value per sample"):
        ppo_clip_loss(**arguments, clip_low=0.1, clip_high=0.1)


def test_the_policy_loss_in_the_log_excludes_the_distance_to_the_reference():
    rl, old = algorithm(kl_beta=0.3, updates_per_rollout=2), Denoiser()
    [batch] = micro_batches(rl, rolled_out(rl, old), update=1)
    loss, stats, _ = evaluated(rl, batch, old.moved(0.01), ref=old)
    assert torch.equal(loss, stats["loss/policy"] + 0.3 * stats["loss/kl"])
    assert stats["kl/ref"].min() > 0


def test_samples_are_split_across_updates_and_train_all_noisy_steps():
    rl = algorithm(updates_per_rollout=2)
    rollouts = rolled_out(rl, Denoiser())
    first, second = rl.updates(rollouts, ADVANTAGES, 1)
    assert [t.row for t in first] == [0] * 9 + [2] * 9
    assert [t.row for t in second] == [1] * 9 + [3] * 9
    assert sorted(t.denoise_step for t in first[:9]) == list(range(9))
    assert {t.is_first_update for t in first} == {True}
    assert {t.is_first_update for t in second} == {False}
    rollouts.first_index = 1  # the samples of this rank are 1 .. 4 of the step
    assert [t.row for t in rl.updates(rollouts, [None, *ADVANTAGES], 1)[0]] == [1] * 9 + [3] * 9


def test_each_sample_trains_random_steps_that_are_equally_likely():
    rl, drawn = algorithm(timestep_fraction=0.34, solver="dance"), Counter()
    rollouts = rolled_out(rl, Denoiser(), count=2)
    apart = 0
    for step in range(1, 501):
        terms = rl.updates(rollouts, [1.0, -1.0], step)[0]
        chosen = [{t.denoise_step for t in terms if t.row == row} for row in (0, 1)]
        assert [len(c) for c in chosen] == [3, 3]
        apart += chosen[0] != chosen[1]
        drawn.update(k for c in chosen for k in c)
    assert apart > 450
    mean = sum(drawn.values()) / 9
    assert sorted(drawn) == list(range(9))
    # chi-square test, 99.9 % quantile, 8 degrees of freedom
    assert sum((n - mean) ** 2 / mean for n in drawn.values()) < 26.1


def test_only_the_policies_that_ratios_need_are_stored_and_evaluated():
    def needs(**keys):
        rl = algorithm(**keys)
        return rl.references, rl.uses_old_predictions, rl.keep_means

    assert needs() == ((), False, False)
    assert needs(kl_beta=0.1) == (("ref",), False, False)
    assert needs(guard=True) == ((), False, False)
    assert needs(guard=True, updates_per_rollout=2) == ((), False, True)
    assert needs(guard=True, old_log_prob="recompute", updates_per_rollout=2) == (("old",), True, False)
    flow_dppo = {"trust_region": "divergence"}
    assert needs(**flow_dppo) == ((), False, False)
    assert needs(**flow_dppo, updates_per_rollout=2) == ((), False, True)
    assert needs(**flow_dppo, old_log_prob="rollout") == ((), False, True)
    assert needs(**flow_dppo, old_log_prob="recompute", updates_per_rollout=2) == (("old",), True, False)
    assert needs(**flow_dppo, rollout=STALE) == (("old",), True, True)  # stale rollouts also need the divergence
    for beta, policies in ((0.0, frozenset()), (0.1, {"ref"})):
        assert algorithm(kl_beta=beta).settings.list_policies(RolloutRecipe()) == policies


def test_statistics_by_step_count_the_terms_of_that_step():
    rl, old = algorithm(updates_per_rollout=2), Denoiser()
    [batch] = micro_batches(rl, rolled_out(rl, old), update=1)
    _, stats, _ = evaluated(rl, batch, old.moved(0.01))
    for k in range(9):
        deviation, mask = stats[f"policy/step{k}/ratio_std"]
        assert mask.sum() == 2
        assert torch.equal(mask.bool(), batch.denoise_step == k)
        assert torch.equal(deviation, stats["policy/ratio_std"])
    torch.testing.assert_close(stats["policy/ratio_mean"], 1 + stats["policy/ratio_std"])
    plain = [t for t in stats.values() if isinstance(t, torch.Tensor)]
    assert all(t.shape == batch.sigma.shape and not t.requires_grad for t in plain)


def test_rollouts_that_training_cannot_reproduce_cause_a_warning(caplog):
    rl = algorithm(clip_ratio=1e-4)
    with caplog.at_level(logging.WARNING):
        rl.check_metrics({"policy/ratio_start_abs_dev": 0.9e-5})
        rl.check_metrics({})
        assert caplog.text == ""
        rl.check_metrics({"policy/ratio_start_abs_dev": 1.1e-5})
    assert "|ratio - 1| is 1.1e-05 on average, more than 10 % of the clip range 1.0e-04" in caplog.text
    caplog.clear()
    rl = algorithm(trust_region="divergence", divergence=2e-5)
    with caplog.at_level(logging.WARNING):
        rl.check_metrics({"policy/ratio_start_abs_dev": 1.0, "policy/divergence_start": 1.9e-6})
        assert caplog.text == ""
        rl.check_metrics({"policy/divergence_start": 2.1e-6})
    assert "the divergence is 2.1e-06 on average, more than 10 % of algorithm.divergence 2.0e-05" in caplog.text


def test_the_start_divergence_compares_rollout_and_first_update():
    rl = algorithm(trust_region="divergence", updates_per_rollout=2)
    sampler = Denoiser()
    rollouts, other = rolled_out(rl, sampler), sampler.moved(0.01)
    [batch] = micro_batches(rl, rollouts)
    assert not evaluated(rl, batch, sampler)[1]["policy/divergence_start"].any()
    stats = evaluated(rl, batch, other)[1]
    std = batch.coefficients[:, STD_COLUMN].float()
    means = [rl._transition_mean(policy(batch.latents, batch.sigma), batch) for policy in (other, sampler)]
    torch.testing.assert_close(stats["policy/divergence_start"], step_divergence(*means, std))
    assert not stats["policy/divergence"].any()  # the trained weights equal the old weights
    [later] = micro_batches(rl, rollouts, update=1)
    assert "policy/divergence_start" not in evaluated(rl, later, other)[1]


@check_each(
    ("keys", "message"),
    [
        ({"solver": "ode"}, r"sampling\.solver ode has none: set it to flow_sde or dance or cps"),
        ({"solver": "dpm2"}, r"sampling\.solver dpm2 has none"),
        ({"solver": "cps", "kl_beta": 0.1, "kl_type": "flow_grpo"}, "not defined for sampling.solver cps"),
        ({"sampling": {"noise_level": 0.0}}, "greater than 0"),
        ({"solver": "cps", "sampling": {"noise_level": 1.5}}, "at most 1 for cps, got 1.5"),
        ({"sampling": {"window": {"kind": "random", "size": 6}}}, r"size 6 and range \[0, 5\]"),
        ({"sampling": {"window": {"kind": "subset", "size": 1, "indices": [9]}}}, "must be at most 8"),
        ({"sampling": {"steps": 1}}, "needs at least 2 steps"),
        ({"solver": "ode", "sampling": {"same_noise": True}}, "injects no noise and does not read same_noise"),
        ({"solver": "ode", "sampling": {"noise_level": 0.7}}, "injects no noise and does not read noise_level"),
        ({"clip_ratio_low": 1.0}, "less than 1"),
        ({"divergence": 1e-4}, r"divergence: only read with trust_region: divergence; remove it"),
        ({"trust_region": "divergence", "clip_ratio": 1e-3}, r"clip_ratio: only read with trust_region: ratio"),
        ({"trust_region": "divergence", "clip_ratio_low": 1e-3}, r"clip_ratio_low: only read with trust_region: ratio"),
        ({"trust_region": "divergence", "divergence": 0}, "greater than 0"),
    ],
)
def test_recipes_that_cannot_work_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        algorithm(**keys)


def test_steps_with_almost_no_noise_are_refused_unless_forced():
    window = {"window": {"kind": "subset", "size": 1, "indices": [2, 8]}}
    with pytest.raises(
        RecipeError, match=r"flow_sde: the noise std of steps \{8: 0.0322\} is below algorithm.min_step_std 0.05"
    ):
        algorithm(sampling={**window, "noise_level": 0.1})
    assert algorithm(sampling={**window, "noise_level": 0.1}, min_step_std=0).plan(1).stored_steps in ((2,), (8,))


def test_clipping_is_the_published_one():
    log_ratio = torch.tensor([math.log(r) for r in (0.5, 0.5, 1.5, 1.5, 1.0)])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss = ppo_clip_loss(log_ratio, advantage, clip_low=0.2, clip_high=0.3)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.3, 1.5, -2.0])


STALE = {"mode": "async", "max_staleness": 1}


REGIONS = {
    "ratio": ({"clip_ratio": 0.05}, 1.5),
    "guard": ({"clip_ratio": 0.05, "guard": True}, 1.5),
    "divergence": ({"trust_region": "divergence", "divergence": 0.1}, 0.4),
}


@check_each("old_log_prob", ["auto", "recompute"])
@check_each("region", REGIONS)
def test_steps_that_the_weights_have_moved_away_from_are_dropped(old_log_prob, region):
    (bounds, most), sampler = REGIONS[region], Denoiser()
    keys = {**bounds, "updates_per_rollout": 2}
    rl = algorithm(old_log_prob=old_log_prob, rollout=STALE, max_drift=most, **keys)
    fresh = algorithm(old_log_prob="recompute", **keys)
    old, now = sampler.moved(0.7), sampler.moved(0.8)
    rollouts = rolled_out(rl, sampler)
    for update, references in enumerate(({}, {"old": old})):
        policy = now if references else old  # the first update uses the old weights
        moved = []
        for batch in micro_batches(rl, rollouts, update=update, size=3):
            loss, stats, _ = evaluated(rl, batch, policy, **references)
            whole, _, _ = evaluated(fresh, batch, policy, **references)
            moved.append(distance(rl, batch, old, sampler))
            dropped = moved[-1] > most
            torch.testing.assert_close(loss, torch.where(dropped, 0.0, whole))
            torch.testing.assert_close(stats["policy/drift"], moved[-1], rtol=1e-4, atol=1e-5)
            assert stats["policy/dropped_fraction"].tolist() == dropped.float().tolist()
        assert 0 < (torch.cat(moved) > most).sum() < len(torch.cat(moved))


def distance(rl, batch, old, sampler):
    """Return the distance [B] between the steps of two policies, in units of the trust region."""
    velocities = [policy(batch.latents, batch.sigma).detach() for policy in (old, sampler)]
    if rl.uses_divergence:
        means = [rl._transition_mean(velocity, batch) for velocity in velocities]
        return step_divergence(*means, batch.coefficients[:, STD_COLUMN].float()) / rl.settings.divergence
    return (rl._log_prob(velocities[0], batch) - batch.rollout_log_prob).abs() / rl.settings.clip_ratio


def test_stale_ratios_to_the_rollout_drop_nothing():
    rl, fresh = (algorithm(old_log_prob="rollout", rollout=r) for r in (STALE, None))
    sampler = Denoiser()
    for batch in micro_batches(rl, rolled_out(rl, sampler), size=5):
        loss, stats, _ = evaluated(rl, batch, sampler.moved(0.3))
        assert torch.equal(loss, evaluated(fresh, batch, sampler.moved(0.3))[0])
        assert "policy/dropped_fraction" not in stats


def test_an_unused_bound_is_refused():
    for rollout, keys in ((None, {}), (STALE, {"old_log_prob": "rollout"})):
        with pytest.raises(ValueError, match=r"max_drift: only read with rollout.mode: async"):
            algorithm(rollout=rollout, max_drift=3, **keys)


def test_strictly_on_policy_workers_change_nothing_in_the_loss():
    rl = algorithm(rollout={"mode": "async", "max_staleness": 0})
    assert not rl.drops_stale_terms
    assert rl.references == ()
