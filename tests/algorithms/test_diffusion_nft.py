import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from each_case import check_each
from wfm_ds.algorithms.base import draw_training_steps
from wfm_ds.algorithms.diffusion_nft import nft_loss, old_decay, reward_weights
from wfm_ds.recipe.algorithms import DecaySchedule

FP64 = torch.float64
SHAPES = [(1, 1, 1, 1), (3, 4, 8, 8), (3, 4, 7, 5), (2, 3, 3, 5, 2)]
SETTINGS = [
    {"beta": 1.0, "adv_clip_max": 5.0, "kl_beta": 1e-4},
    {"beta": 0.1, "adv_clip_max": 2.0, "kl_beta": 0.0},
    {"beta": 0.7, "adv_clip_max": 5.0, "kl_beta": 0.3},
]


def case(shape, *, kl=True, seed=0, dtype=torch.float32):
    """Inputs of nft_loss, with r at both ends and in between."""
    generator = torch.Generator().manual_seed(seed)
    names = ["velocity", "old_velocity", "clean_latents", "noise", *(["ref_velocity"] if kl else [])]
    inputs = {name: torch.randn(shape, generator=generator, dtype=FP64).to(dtype) for name in names}
    inputs["old_velocity"] = inputs["velocity"] + 0.2 * inputs["old_velocity"]
    inputs["velocity"].requires_grad_()
    inputs["sigma"] = torch.tensor([0.2, 0.6, 0.95], dtype=dtype)[: shape[0]]
    inputs["reward_weight"] = torch.tensor([0.57, 0.37, 1.0], dtype=dtype)[: shape[0]]
    return inputs


def in_double(inputs):
    return {name: tensor.detach().double() for name, tensor in inputs.items()}


def mean(x):
    return x.flatten(1).mean(1)


def reference(
    velocity, old_velocity, clean_latents, noise, sigma, reward_weight, *, beta, adv_clip_max, kl_beta, **ref
):
    """Loss and gradient as the paper writes them, through x_s and x0 predictions. All float64."""
    x0, n, v_ref = clean_latents, clean_latents[0].numel(), ref.get("ref_velocity", velocity)
    s, r = (t.view(-1, *[1] * (x0.ndim - 1)) for t in (sigma, reward_weight))
    x_s = (1 - s) * x0 + s * noise
    v_plus = beta * velocity + (1 - beta) * old_velocity
    v_minus = (1 + beta) * old_velocity - beta * velocity
    e_plus, e_minus = x_s - s * v_plus - x0, x_s - s * v_minus - x0
    w_plus = mean(e_plus.abs()).clamp_min(1e-5)
    w_minus = mean(e_minus.abs()).clamp_min(1e-5)
    l_plus, l_minus = mean(e_plus**2) / w_plus, mean(e_minus**2) / w_minus
    kl = mean((velocity - v_ref) ** 2)
    loss = adv_clip_max * (reward_weight * l_plus + (1 - reward_weight) * l_minus) / beta + kl_beta * kl

    u = noise - x0
    over_plus, over_minus = (w.view_as(s) for w in (w_plus, w_minus))
    pull = -r * (u - v_plus) / over_plus + (1 - r) * (u - v_minus) / over_minus
    gradient = 2 * adv_clip_max * s**2 / n * pull + 2 * kl_beta / n * (velocity - v_ref)
    return loss, gradient, (l_plus, l_minus, kl)


def gradient_of(inputs, **setting):
    loss_B, _ = nft_loss(**inputs, **setting)
    return torch.autograd.grad(loss_B.sum(), inputs["velocity"])[0]


def assert_close(got, want, relative):
    assert (got.double() - want).abs().max() <= relative * want.abs().max()


@check_each("setting", SETTINGS)
@check_each("shape", SHAPES)
def test_value_and_gradient_equal_the_published_form_in_float64(shape, setting):
    inputs = case(shape, kl=setting["kl_beta"] > 0)
    loss_B, stats = nft_loss(**inputs, **setting)
    want, want_gradient, (l_plus, l_minus, kl) = reference(**in_double(inputs), **setting)
    assert loss_B.shape == shape[:1]
    assert loss_B.dtype == torch.float32
    assert_close(loss_B, want, 1e-5)
    assert_close(gradient_of(inputs, **setting), want_gradient, 1e-5)
    assert_close(stats["nft/loss_positive"], l_plus, 1e-5)
    assert_close(stats["nft/loss_negative"], l_minus, 1e-5)
    if setting["kl_beta"] > 0:
        assert_close(stats["kl/ref"], kl, 1e-5)


@pytest.mark.parametrize("shape", [(2, 2, 3, 1), (2, 1, 2, 3, 2)])
def test_gradient_equals_finite_differences_with_the_weights_held(shape):
    setting, h = {"beta": 0.7, "adv_clip_max": 5.0, "kl_beta": 0.3}, 1e-6
    inputs = case(shape, dtype=FP64)
    fixed = in_double(inputs)
    s = fixed["sigma"].view(-1, *[1] * (len(shape) - 1))
    u, old, base = fixed["noise"] - fixed["clean_latents"], fixed["old_velocity"], fixed["velocity"]

    def errors(v):
        return [s * (u - old - sign * setting["beta"] * (v - old)) for sign in (1, -1)]

    weights = [mean(e.abs()) for e in errors(base)]

    def loss(v):
        r = fixed["reward_weight"]
        plus, minus = (mean(e**2) / w for e, w in zip(errors(v), weights, strict=True))
        policy = setting["adv_clip_max"] * (r * plus + (1 - r) * minus) / setting["beta"]
        return (policy + setting["kl_beta"] * mean((v - fixed["ref_velocity"]) ** 2)).sum()

    gradient = gradient_of(inputs, **setting).flatten()
    for i, direction in enumerate(torch.eye(base.numel(), dtype=FP64)):
        nudge = h * direction.view(shape)
        slope = (loss(base + nudge) - loss(base - nudge)) / (2 * h)
        assert abs(slope - gradient[i]) <= 1e-7 * gradient.abs().max()


def on_policy(shape, advantages, adv_clip_max, seed=0):
    inputs = case(shape, kl=False, seed=seed)
    inputs["old_velocity"] = inputs["velocity"].detach()
    inputs["reward_weight"] = reward_weights(advantages, adv_clip_max)
    return inputs


@pytest.mark.parametrize("shape", [(3, 4, 7, 5), (3, 2, 3, 5, 1)])
def test_on_policy_the_gradient_is_the_advantage_times_the_error_whatever_beta_and_clip(shape):
    advantages = [0.7, -1.3, 0.4]
    for beta, clip in [(1.0, 5.0), (0.1, 5.0), (1.0, 2.0)]:
        inputs = on_policy(shape, advantages, clip)
        exact = in_double(inputs)
        error = exact["noise"] - exact["clean_latents"] - exact["old_velocity"]
        factor = -2 * torch.tensor(advantages, dtype=FP64) * exact["sigma"] / (error[0].numel() * mean(error.abs()))
        want = factor.view(-1, *[1] * (len(shape) - 1)) * error
        assert_close(gradient_of(inputs, beta=beta, adv_clip_max=clip, kl_beta=0.0), want, 2e-6 * clip / 0.4)


def test_on_policy_the_gradient_is_antisymmetric_in_the_advantage_and_zero_without_one():
    setting = {"beta": 0.3, "adv_clip_max": 5.0, "kl_beta": 0.0}
    up = gradient_of(on_policy((3, 4, 7, 5), [1.25, -2.5, 5.0], 5.0), **setting)
    down = gradient_of(on_policy((3, 4, 7, 5), [-1.25, 2.5, -5.0], 5.0), **setting)
    assert up.abs().min() > 0
    assert torch.equal(up, -down)
    none = gradient_of(on_policy((3, 4, 7, 5), [0.0, 0.0, 0.0], 5.0), **setting)
    assert not none.any()


@given(st.floats(-6, 6), st.floats(0.05, 2), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_a_step_away_from_old_and_its_opposite_swap_with_the_sign_of_the_advantage(advantage, beta, seed):
    inputs = case((1, 2, 3, 5), kl=False, seed=seed)
    step = inputs["velocity"].detach() - inputs["old_velocity"]
    losses = []
    for sign in (1, -1):
        inputs["velocity"] = inputs["old_velocity"] + sign * step
        inputs["reward_weight"] = reward_weights([sign * advantage], 5.0)
        losses.append(nft_loss(**inputs, beta=beta, adv_clip_max=5.0, kl_beta=0.0)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@check_each("name", ["reward_weight", "sigma", "velocity", "old_velocity", "noise", "ref_velocity"])
def test_what_happens_to_one_sample_changes_no_other(name):
    setting, inputs = SETTINGS[2], case((3, 4, 7, 5))
    loss_B, _ = nft_loss(**inputs, **setting)
    gradient = gradient_of(inputs, **setting)
    changed = {k: t.detach().clone() for k, t in inputs.items()}
    changed[name][1] *= 0.5
    changed["velocity"].requires_grad_()
    others = [0, 2]
    loss_after, _ = nft_loss(**changed, **setting)
    gradient_after = gradient_of(changed, **setting)
    assert torch.equal(loss_after[others], loss_B[others])
    assert torch.equal(gradient_after[others], gradient[others])
    assert loss_after[1] != loss_B[1]
    assert not torch.equal(gradient_after[1], gradient[1])


@given(st.permutations(range(6)), st.lists(st.integers(1, 4), min_size=2, max_size=6))
@settings(deadline=None, max_examples=30)
def test_order_and_micro_batches_do_not_change_the_gradient(order, sizes):
    generator = torch.Generator().manual_seed(3)
    data = {n: torch.randn((6, 2, 3, 4), generator=generator) for n in ("features", "old_velocity", "clean_latents")}
    data |= {"noise": torch.randn((6, 2, 3, 4), generator=generator), "sigma": torch.rand(6, generator=generator)}
    data["reward_weight"] = torch.rand(6, generator=generator)

    def gradient(parts):
        weight = torch.tensor([[1.0, 0.2], [-0.3, 0.8]], requires_grad=True)
        for part in parts:
            inputs = {name: tensor[part] for name, tensor in data.items()}
            velocity = torch.einsum("dc,bchw->bdhw", weight, inputs.pop("features"))
            loss_B, _ = nft_loss(velocity, **inputs, beta=0.5, adv_clip_max=5.0, kl_beta=0.0)
            (loss_B.sum() / 6).backward()
        return weight.grad.double()

    cuts, parts = list(order), []
    for size in sizes:
        parts.append(cuts[:size])
        cuts = cuts[size:]
    parts = [p for p in [*parts, cuts] if p]
    assert_close(gradient(parts), gradient([list(range(6))]), 1e-6)


def test_an_exact_fit_costs_nothing_and_stays_finite():
    inputs = case((3, 2, 3, 5), kl=False)
    exact = (inputs["noise"] - inputs["clean_latents"]).detach()
    inputs |= {"velocity": exact.clone().requires_grad_(), "old_velocity": exact}
    loss_B, _ = nft_loss(**inputs, beta=1.0, adv_clip_max=5.0, kl_beta=0.0)
    assert not loss_B.any()
    assert not gradient_of(inputs, beta=1.0, adv_clip_max=5.0, kl_beta=0.0).any()


def test_the_policy_loss_in_the_log_excludes_the_distance_to_the_reference():
    inputs = case((3, 4, 7, 5))
    loss_B, stats = nft_loss(**inputs, **SETTINGS[2])
    inputs.pop("ref_velocity")
    policy_B, without = nft_loss(**inputs, **SETTINGS[2] | {"kl_beta": 0.0})
    assert torch.equal(stats["loss/policy"], policy_B.detach())
    assert torch.equal(loss_B.detach(), stats["loss/policy"] + 0.3 * stats["loss/kl"])
    assert "kl/ref" in stats
    assert not {"kl/ref", "loss/kl", "nft/old_ref_deviation"} & set(without)


def test_stats_are_per_sample_detached_and_what_their_names_say():
    inputs = case((3, 4, 7, 5))
    _, stats = nft_loss(**inputs, **SETTINGS[0])
    exact = in_double(inputs)
    deviation = (exact["velocity"] - exact["old_velocity"]) ** 2
    assert all(value.shape == (3,) and not value.requires_grad for value in stats.values())
    assert_close(stats["nft/old_deviation"], mean(deviation), 1e-5)
    assert_close(stats["nft/old_deviation_max"], deviation.flatten(1).amax(1), 1e-5)
    assert_close(stats["nft/old_ref_deviation"], mean((exact["old_velocity"] - exact["ref_velocity"]) ** 2), 1e-5)
    assert_close(stats["nft/x0_norm"], mean(exact["clean_latents"] ** 2), 1e-5)
    assert torch.equal(stats["nft/r_mean"], inputs["reward_weight"])


def test_only_the_trained_velocity_gets_a_gradient():
    inputs = case((2, 2, 3, 3))
    for name in ("old_velocity", "ref_velocity"):
        inputs[name].requires_grad_()
    nft_loss(**inputs, **SETTINGS[0])[0].sum().backward()
    assert inputs["velocity"].grad is not None
    assert inputs["old_velocity"].grad is None
    assert inputs["ref_velocity"].grad is None


def test_the_trained_velocity_itself_stands_in_for_an_equal_old_one():
    inputs = on_policy((3, 4, 7, 5), [0.7, -1.3, 0.4], 5.0)
    setting = {"beta": 0.7, "adv_clip_max": 5.0, "kl_beta": 0.0}
    with_copy = gradient_of(inputs, **setting)
    inputs["old_velocity"] = inputs["velocity"]
    assert torch.equal(gradient_of(inputs, **setting), with_copy)


@check_each(
    ("changes", "message"),
    [
        ({"reward_weight": torch.zeros(3, 1)}, r"reward_weight must be \[3\]"),
        ({"sigma": torch.zeros(3, 1)}, r"sigma must be \[3\]"),
        ({"reward_weight": torch.zeros(1)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.tensor(0.5)}, r"reward_weight must be \[3\]"),
        ({"reward_weight": torch.ones(3, dtype=torch.int64)}, "reward_weight must be torch.float32"),
        ({"sigma": torch.full((3,), 500)}, "sigma must be torch.float32"),
        ({"old_velocity": torch.zeros(3, 4, 1, 5)}, "the same shape"),
        ({"noise": torch.zeros(3, 4, 7, 5).bfloat16()}, "float32"),
        ({"velocity": torch.zeros(3, 4, 7, 5).long()}, "float32"),
        ({"ref_velocity": torch.zeros(1, 4, 7, 5)}, "the same shape"),
        ({"ref_velocity": None}, "ref_velocity is missing"),
        ({"kl_beta": 0.0}, "ref_velocity is set"),
        ({"beta": 0.0}, "beta 0.0"),
        ({"adv_clip_max": 0.0}, "adv_clip_max 0.0"),
        ({"kl_beta": -1.0}, "kl_beta -1.0"),
    ],
)
def test_wrong_shapes_types_and_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        nft_loss(**case((3, 4, 7, 5)) | SETTINGS[0] | changes)


def test_reward_weights_of_known_advantages():
    assert reward_weights([0.7, -1.3, 9.0], 5.0).tolist() == pytest.approx([0.57, 0.37, 1.0])
    assert reward_weights([-9.0, 0.0], 2.0).tolist() == [0.0, 0.5]
    assert reward_weights([0.1], 5.0).dtype == torch.float32


@check_each("advantages", [[float("nan")], [float("inf")], [[0.1], [0.2]]])
def test_reward_weights_need_one_finite_advantage_per_sample(advantages):
    with pytest.raises(ValueError, match="finite, one per sample"):
        reward_weights(advantages, 5.0)


@check_each(
    ("setting", "decays"),
    [
        ("copy", {0: 0.0, 1: 0.0, 1000: 0.0}),
        ("standard", {0: 0.0, 1: 0.001, 499: 0.499, 500: 0.5, 9999: 0.5}),
        ("slow", {1: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 100: 0.1875, 208: 0.9975, 300: 0.999}),
        (DecaySchedule(flat_steps=3, initial=0.2, slope=0.1, max=0.45), {2: 0.2, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.45}),
    ],
)
def test_decay_of_the_old_policy(setting, decays):
    assert {j: old_decay(setting, j) for j in decays} == pytest.approx(decays)


def test_an_unknown_decay_is_refused():
    with pytest.raises(ValueError, match="unknown old policy decay 'fast': use copy, standard, slow or a schedule"):
        old_decay("fast", 1)


@given(st.integers(1, 60), st.integers(1, 100), st.integers(0, 2**63 - 1))
def test_trained_steps_are_a_share_of_all_each_at_most_once(num_steps, percent, seed):
    fraction = percent / 100
    indices = draw_training_steps(num_steps, fraction, seed)
    assert len(indices) == len(set(indices)) == max(1, num_steps * percent // 100)
    assert set(indices) <= set(range(num_steps))
    assert indices == draw_training_steps(num_steps, fraction, seed)


def test_the_default_share_of_ten_steps_is_nine_and_all_steps_come_shuffled_too():
    assert len(draw_training_steps(10, 0.99, 0)) == 9
    assert draw_training_steps(10, 1.0, 0) != draw_training_steps(10, 1.0, 1) != list(range(10))


def test_every_step_is_drawn_equally_often_the_last_too():
    num_draws, counts = 5000, torch.zeros(10)
    for seed in range(num_draws):
        counts[draw_training_steps(10, 0.1, seed)[0]] += 1
    assert ((counts - num_draws / 10) ** 2 / (num_draws / 10)).sum() < 27.9  # 99.9 % quantile, 9 degrees of freedom


def test_samples_of_one_batch_are_trained_on_independent_steps():
    num_draws, counts = 5000, torch.zeros(5, 5)
    for seed in range(num_draws):
        first, second = (draw_training_steps(5, 0.2, s)[0] for s in (2 * seed, 2 * seed + 1))
        counts[first, second] += 1
    assert ((counts - num_draws / 25) ** 2 / (num_draws / 25)).sum() < 51.2  # 99.9 % quantile, 24 degrees of freedom


@check_each(("num_steps", "fraction"), [(0, 0.5), (10, 0.0), (10, 1.1), (10, float("nan"))])
def test_an_impossible_share_is_refused(num_steps, fraction):
    with pytest.raises(ValueError, match="cannot train on fraction"):
        draw_training_steps(num_steps, fraction, 0)
